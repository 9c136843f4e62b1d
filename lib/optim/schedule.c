#include "optim/schedule.h"

#include <math.h>

static const double pi = 3.14159265358979323846;

/* Share of the way down that is left after the share w of it. */
static double wsd_share(int style, double w)
{
    switch (style) {
    case WSD_COSINE:
        return (cos(pi * w) + 1) / 2;
    case WSD_EXPONENTIAL:
        return 2 * pow(0.5, w) - 1;
    case WSD_MINUS_SQRT:
        return 1 - sqrt(w);
    default:
        return 1 - w;
    }
}

double schedule_lr(const struct optim_config *o, int64_t total_steps, int64_t s)
{
    int64_t end = o->decay_steps ? o->decay_steps : total_steps, fall = end - o->wsd_decay_steps;
    double share = 1, r;

    if (o->warmup > 0 && s <= o->warmup) return o->lr * (double)s / (double)o->warmup;
    if (o->schedule == SCHEDULE_CONSTANT) return o->lr;
    if (s > end) return o->min_lr;
    r = end > o->warmup ? (double)(s - o->warmup) / (double)(end - o->warmup) : 0;
    if (o->schedule == SCHEDULE_LINEAR) share = 1 - r;
    if (o->schedule == SCHEDULE_COSINE) share = (cos(pi * r) + 1) / 2;
    if (o->schedule == SCHEDULE_WSD && s > fall)
        share = wsd_share(o->wsd_style, (double)(s - fall) / (double)o->wsd_decay_steps);
    return o->min_lr + share * (o->lr - o->min_lr);
}
