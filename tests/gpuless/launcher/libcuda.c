/* A libcuda that runs nothing: the functions with which Triton 3.6 to 3.9 load and launch a kernel,
 * on an H100 as in ../torch_cuda.py. Python is told of each launch. */

#include <cuda.h>
#include <stdio.h>
#include <string.h>

/* tests give these other values; CUDA_SUCCESS is 0 */
int load_result, pointer_result, launch_result;
int max_threads = 1024; /* of a block, for any kernel */
int loads;              /* how many modules were loaded so far */
void (*on_launch)(const CUlaunchConfig *, CUfunction, void **);

static char some_context, some_module;

/* Called by Triton's launcher, before anything else. */
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)&some_context;
  return CUDA_SUCCESS;
}

/* Called by Triton's launcher for every tensor: at which address does the device see it? */
CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return pointer_result;
}

/* Called by Triton's launcher; Triton 3.6 compiles one for each signature. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters,
                          void **extra) {
  if (launch_result == CUDA_SUCCESS)
    on_launch(config, function, parameters);
  return launch_result;
}

/* The next three are called by Triton's load_binary. */
CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)&some_module;
  loads += load_result == CUDA_SUCCESS;
  return load_result;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name); /* each function has its own address */
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? max_threads : 0;
  return CUDA_SUCCESS;
}

/* The next two are called by load_binary where a kernel takes more than 48 KiB of shared memory. */
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

/* Called where a compiled kernel is deleted; not in Triton 3.6. */
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

/* The next two are called by load_binary and get_device_properties: does a kernel fit? */
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

/* Called for the text of an error. */
CUresult cuGetErrorString(CUresult error, const char **text) {
  static char sentence[64];
  snprintf(sentence, sizeof sentence, "error %d of the driver", error);
  *text = sentence;
  return CUDA_SUCCESS;
}

/* Never called: a context is there, no kernel prints, and torch knows the current device. They have
 * to be defined, because Triton's C modules link against them. */
#define NEVER(name, ...) CUresult name(__VA_ARGS__) { return CUDA_ERROR_NOT_SUPPORTED; }
NEVER(cuCtxGetDevice, CUdevice *device)
NEVER(cuCtxGetLimit, size_t *value, CUlimit limit)
NEVER(cuCtxSetCurrent, CUcontext context)
NEVER(cuCtxSetLimit, CUlimit limit, size_t value)
NEVER(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
NEVER(cuDriverGetVersion, int *version)
NEVER(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus *status)
