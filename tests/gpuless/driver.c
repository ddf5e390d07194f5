/* What torch asks of a CUDA driver before the first kernel: how many devices there are, and whether
 * one of them has a context. Loaded before torch, it is found in the place of torch's own function
 * and of libcuda.so.1. Without devices, torch is as on any machine without a GPU.
 *
 * Others find it by that name, too (the CUDA runtime, numba, cuda.bindings). Whatever they ask, by a
 * function of that name or by cuGetProcAddress, the answer is that there is no device.
 */

#include <string.h>

enum { SUCCESS = 0, NO_DEVICE = 100 }; /* of CUresult */

int devices = 0;

signed char _ZN3c104cuda12device_countEv(void) { return devices; } /* c10::cuda::device_count() */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = *active = 0;
  return SUCCESS;
}

int cuInit(void) { return NO_DEVICE; } /* whatever the arguments: the caller removes them */

/* Weak: launcher/libcuda.c, which is linked with this file, has a device to answer for. */
__attribute__((weak)) int cuDriverGetVersion(void) { return NO_DEVICE; }
__attribute__((weak)) int cuDeviceGet(void) { return NO_DEVICE; }

int cuDeviceGetCount(int *count) {
  *count = 0;
  return NO_DEVICE;
}

int cuGetProcAddress(const char *symbol, void **function, int version, unsigned long long flags) {
  int is_state = !strcmp(symbol, "cuDevicePrimaryCtxGetState");
  *function = is_state ? (void *)cuDevicePrimaryCtxGetState : (void *)cuInit;
  return SUCCESS;
}

int cuGetProcAddress_v2(
    const char *symbol, void **function, int version, unsigned long long flags, int *status) {
  if (status)
    *status = SUCCESS;
  return cuGetProcAddress(symbol, function, version, flags);
}
