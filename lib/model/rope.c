#include "model/rope.h"

#include <math.h>

void model_inverse_frequency(double theta, int half, float *out)
{
    for (int j = 0; j < half; j++) out[j] = 1.0f / powf((float)theta, (float)(2 * j) / (float)(2 * half));
}
