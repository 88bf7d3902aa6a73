/* What a session is made of; shared by the files of this room, and session.c.
 */
#ifndef RKSC_STATE_H
#define RKSC_STATE_H

#include "forward.h"
#include "kv/plan.h"
#include "kv/tree.h"
#include "model/place.h"
#include "requests.h"

/* Rows of one `pick`; more outputs than that go in several. */
#define RK_MAX_OUTPUTS 64

/* Tokens [begin, end) of a branch as rows of a step. write: begin is the
 * branch's n_computed and the rows' KV is kept at the close; not write: all of
 * their KV is there already and the rows only look (a peek). */
typedef struct rk_item {
    rk_branch *branch;
    int32_t begin, end;
    bool write;
} rk_item;

/* The step that is open: at most options.step_tokens rows. */
typedef struct rk_step {
    rk_item *items;      /* (step_tokens,) */
    rk_span *spans;      /* (step_tokens,) */
    int32_t *first_rows; /* (step_tokens,) batch row of each item's first */
    int32_t *leaders; /* (step_tokens,) the first item with equal rows, itself
                       * where it is the first */
    int32_t *starts;  /* (step_tokens,) first row of each span */
    int32_t *rows;    /* (step_tokens,) scratch: rows that give outputs */
    int32_t *source;  /* (step_tokens,) scratch of shrink */
    rk_draw *draws;   /* (step_tokens,) */
    rk_pick *picks;   /* (step_tokens,) */
    int32_t n_items;
    rk_batch batch;
} rk_step;

typedef struct rk_request rk_request;

/* Requests in the order in which they came, see scheduler.c. */
typedef struct rk_scheduler {
    rk_request **requests; /* (n,) owned; their ids rise */
    int32_t n, capacity;
    uint64_t next_id;
    bool litter;        /* a group has ended whose records are there */
    bool stalled;       /* somebody was sent back for want of blocks */
    uint64_t turn;      /* first request of the group whose turn it is */
    uint64_t blamed;    /* whose failure the last step was; 0: nobody's */
    rk_token *events;   /* owned, two for every request */
    double *confidence; /* owned scratch, one for every request */
    int32_t *rows;      /* owned scratch, two for every request */
    int32_t n_events;
} rk_scheduler;

struct rk_session {
    rk_model model;
    rk_options options;
    rk_device *device;
    rk_placed *placed; /* owned: where model's weights are */
    rk_forward forward;
    rk_kv *kv;
    rk_plan *plan;
    rk_tree tree;
    rk_step step;
    rk_scheduler scheduler;
    rk_request **owners; /* (step_tokens,) scratch: whose row an item is */
    int32_t *outputs;    /* (step_tokens,) scratch: items that give a token */
    uint64_t clock;      /* steps so far */
    rk_stats stats;      /* the counters among them */
};

#endif
