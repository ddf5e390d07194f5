/* A libcuda in which nothing runs: what Triton 3.6 to 3.9 ask of a driver to load and launch a
 * kernel, for the H100 of ../torch_cuda.py. A launch is handed to Python.
 *
 * Triton's modules name all of these, so all have to be there when they are loaded. */

#include <cuda.h>
#include <stdio.h>
#include <string.h>

/* planted by tests, CUDA_SUCCESS (0) otherwise */
int load_result, pointer_result, launch_result;
int max_threads = 1024; /* of a block, for any kernel */
int loads;              /* how many modules were loaded so far */
void (*on_launch)(const CUlaunchConfig *, CUfunction, void **);

static char some_context, some_module;

/* Triton's launcher, before anything else: a context to work in */
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)&some_context;
  return CUDA_SUCCESS;
}

/* its launcher, for every tensor: the address that the device sees */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return pointer_result;
}

/* its launcher; up to 3.6 a C program for each signature, from 3.7 on one for all */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  if (launch_result == CUDA_SUCCESS)
    on_launch(config, function, parameters);
  return launch_result;
}

/* its load_binary: a module, the kernel in it, what it takes and may take */
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)&some_module;
  loads += load_result == CUDA_SUCCESS;
  return load_result;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name); /* an address of its own; Triton never gives it back */
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? max_threads : 0;
  return CUDA_SUCCESS;
}

/* its load_binary, for more than 48 KiB of shared memory */
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

/* where a compiled kernel is forgotten; not in 3.6 */
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

/* its load_binary and get_device_properties: does a kernel fit? */
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  switch (attribute) {
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 227 << 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 228 << 10; break;
  case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 1 << 16; break;
  case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
  case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
  default: *value = 0; /* clocks and the width of a bus */
  }
  return CUDA_SUCCESS;
}

/* whoever reports an error */
CUresult cuGetErrorString(CUresult error, const char **text) {
  static char sentence[64];
  snprintf(sentence, sizeof sentence, "error %d of the driver", error);
  *text = sentence;
  return CUDA_SUCCESS;
}

/* named by Triton's modules, and not asked here: there is a context, no printf in a kernel, no
 * tensor descriptor, and torch says which device is the current one */
#define NEVER(name, ...) CUresult name(__VA_ARGS__) { return CUDA_ERROR_NOT_SUPPORTED; }
NEVER(cuCtxGetDevice, CUdevice *device)
NEVER(cuCtxGetLimit, size_t *value, CUlimit limit)
NEVER(cuCtxSetCurrent, CUcontext context)
NEVER(cuCtxSetLimit, CUlimit limit, size_t value)
NEVER(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
NEVER(cuDriverGetVersion, int *version)
NEVER(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus *status)
