/* What all devices share. */
#include "ops/ops.h"

void stream_close(struct stream *s)
{
    if (s->ops) s->ops->close(s);
    s->ops = NULL;
}
