/* Gradients of parameters within a step: what comes first is written, the rest is added to it. So nothing has to clear
 * them all before the step, and the first product reads nothing. */
#include <string.h>

#include "base/dtype.h"
#include "model/model.h"
#include "model/pass.h"

int gradient_add(const struct pass *b, const struct parameter *w, int count)
{
    unsigned char *written = b->written ? b->written + (w - b->model->parameters.at) : NULL;

    if (!written || *written) return 1;
    memset(written, 1, (size_t)count);
    return 0;
}

static void clear(const struct pass *b, const struct parameter *w)
{
    b->ops->zero(b->stream, w->gradient, w->count * dtype_size(w->gradient_type));
}

void *gradient_sum(const struct pass *b, const struct parameter *w)
{
    if (w->gradient && !gradient_add(b, w, 1)) clear(b, w);
    return w->gradient;
}

void gradient_clear_rest(const struct pass *b)
{
    const struct parameters *t = &b->model->parameters;

    for (uint32_t i = 0; i < t->count; i++) gradient_sum(b, &t->at[i]);
}
