/* What all devices share. */
#include "ops/ops.h"

#include "base/dtype.h"

void stream_close(struct stream *s)
{
    if (s->ops) s->ops->close(s);
    s->ops = NULL;
}

void stream_read(struct stream *s, glm52_dtype type, const void *from_device, uint64_t count, float *values,
                 void *buffer)
{
    if (type != GLM52_DTYPE_BF16) {
        s->ops->download(s, values, from_device, count * sizeof *values);
        return;
    }
    s->ops->download(s, buffer, from_device, count * sizeof(uint16_t));
    for (uint64_t i = 0; i < count; i++) values[i] = bf16_to_f32(((uint16_t *)buffer)[i]);
}

void stream_write(struct stream *s, glm52_dtype type, void *to_device, uint64_t count, const float *values,
                  void *buffer)
{
    if (type != GLM52_DTYPE_BF16) {
        s->ops->upload(s, to_device, values, count * sizeof *values);
        return;
    }
    for (uint64_t i = 0; i < count; i++) ((uint16_t *)buffer)[i] = f32_to_bf16(values[i]);
    s->ops->upload(s, to_device, buffer, count * sizeof(uint16_t));
}
