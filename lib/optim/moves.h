/* Which operations one update consists of. */
#ifndef GLM52_OPTIM_MOVES_H
#define GLM52_OPTIM_MOVES_H

#include "optim/optimizer.h"

/* Fills placed, move and state_elements. Refuses rules that name nothing or that do not fit. */
glm52_status plan_moves(struct optimizer *o, const struct config *config);

#endif
