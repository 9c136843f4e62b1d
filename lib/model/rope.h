/* Rotary frequencies as published code builds them in fp32: 1 / powf(theta, 2j / d). At position 1M another rounding
 * moves a cosine by up to 0.015 (docs/design.md 5). */
#ifndef GLM52_MODEL_ROPE_H
#define GLM52_MODEL_ROPE_H

/* out[half]; the rotated width d is 2 * half. */
void model_inverse_frequency(double theta, int half, float *out);

#endif
