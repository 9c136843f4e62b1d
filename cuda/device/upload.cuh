/* The way of host memory to the device. */
#pragma once

#include "device/device.cuh"

glm52_status upload_open(struct stream *s);
void upload_close(struct stream *s);
void device_upload(struct stream *s, void *to_device, const void *from_host, size_t bytes);
