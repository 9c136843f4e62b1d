/* Between the library and its back end; see ops/cuda.h. */
#pragma once

#include "device/device.cuh"

extern "C" {
#include "ops/cuda.h"
}

extern "C" void host_account(struct host *host, enum memory_class of, int64_t bytes);
void timing_close(cuda_device *d);
const struct ops *whole_table(void);
void use_services(const struct cuda_services *services);
int count_devices(void);
void describe_device(int index, char *text, size_t bytes);
glm52_status open_device(struct stream *s, struct host *host, int index);
void plan_device(struct stream *s, size_t *workspace);
