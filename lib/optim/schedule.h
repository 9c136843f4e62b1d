/* Learning rate of an update: warm-up from 0, then constant, cosine, linear or warm-up-stable-decay (WSD). */
#ifndef GLM52_OPTIM_SCHEDULE_H
#define GLM52_OPTIM_SCHEDULE_H

#include "config/config.h"

/* s: number of the update, from 1; 0 gives the value before the first. total_steps stands for decay_steps = 0. */
double schedule_lr(const struct optim_config *o, int64_t total_steps, int64_t s);

#endif
