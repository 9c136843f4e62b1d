/* A packed row of documents in host memory: what a batch holds and a dataset produces. */
#ifndef GLM52_DATA_PACK_H
#define GLM52_DATA_PACK_H

#include "base/host.h"

enum { PACK_NO_LABEL = -100 };

struct pack {
    struct host *host;
    int64_t rows, documents, capacity, document_capacity;
    int32_t *token;      /* [rows] */
    int32_t *cu_seqlens; /* [documents + 1] */
    int32_t *label;      /* [rows], PACK_NO_LABEL for none */
    float *mask;         /* [rows], weight of the row's loss */
    float *counted;      /* [rows], 0 for rows that take part in nothing (padding); NULL: all do */
};

void pack_init(struct pack *p, struct host *host);
void pack_free(struct pack *p);
/* Room for that many; contents become empty. A failure leaves them as they were. */
glm52_status pack_reserve(struct pack *p, int64_t rows, int64_t documents);
/* Labels from tokens and documents: the next token inside the document. */
void pack_default_labels(struct pack *p);
/* Sum of mask over labelled rows. */
double pack_loss_weight(const struct pack *p);
/* Refuses empty packs, cu_seqlens that do not rise from 0 to rows, ids outside the vocabulary (with the position),
 * labels outside it, masks that are negative or not finite, documents of more than `longest` tokens. */
glm52_status pack_validate(const struct pack *p, int64_t vocabulary, int64_t longest);
/* Visible (query, key) pairs: all causal ones, and those of at most k keys per query. The last `blind` rows of each
 * document see nothing. */
void pack_pairs(const struct pack *p, int64_t k, int64_t blind, double *causal, double *selected);

#endif
