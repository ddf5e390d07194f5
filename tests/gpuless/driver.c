/* What torch asks of a CUDA driver before the first kernel: how many devices there are, and whether
 * one of them has a context. Loaded before torch, it is found in the place of torch's own function
 * and of libcuda.so.1. Without devices, torch is as on any machine without a GPU. */

int devices = 0;

signed char _ZN3c104cuda12device_countEv(void) { return devices; } /* c10::cuda::device_count() */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = *active = 0;
  return 0;
}
