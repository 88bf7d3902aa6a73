/* What a session is made of; shared by the files that implement session.h. */
#ifndef RKSC_STATE_H
#define RKSC_STATE_H

#include "forward.h"
#include "place.h"
#include "plan.h"
#include "session.h"

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

/* ---- step.c -------------------------------------------------------------- */

/* RK_ECAPACITY when so many blocks cannot be free at once, whatever is evicted:
 * branches that are pinned keep theirs. */
rk_status rk_step_check_room(const rk_session *s, int64_t needed,
                             rk_error *err);

/* Make room (cached blocks first, then RSBCM), give the items blocks, build
 * the batch and embed its rows into `x` (NULL: the forward's own). The items'
 * branches are pinned until the close. RK_ECAPACITY: no room; nothing is open.
 */
rk_status rk_step_open(rk_session *s, const rk_item *items, int32_t n_items,
                       float *x, rk_error *err);
/* The same for rows whose residual stream the caller holds already. */
rk_status rk_step_reopen(rk_session *s, const rk_item *items, int32_t n_items,
                         rk_error *err);
/* Run layers [from, to) over the open step; RK_EINTERRUPTED in between. */
rk_status rk_step_layers(rk_session *s, int32_t from, int32_t to, float *x,
                         rk_error *err);
/* After every layer, and after evictions: has a signal come? */
rk_status rk_step_signal(const rk_session *s, rk_error *err);
/* Keep only items[keep[i]], i < n, of the open step and their rows of f->x;
 * the others are closed without their KV. keep rises. */
rk_status rk_step_shrink(rk_session *s, const int32_t *keep, int32_t n,
                         rk_error *err);
/* commit false: the rows' KV is forgotten. */
void rk_step_close(rk_session *s, bool commit);

/* Close, neither forgetting nor counting: the rows' KV is there for some
 * layers, and the caller goes on with the same rows later. */
void rk_step_suspend(rk_session *s);

/* Open, all layers, the choice of n_outputs rows, close with commit.
 * Output i is the last row of items[output_items[i]] minus back[i] (NULL: 0);
 * draws and picks: (n_outputs,). */
rk_status rk_step_run(rk_session *s, const rk_item *items, int32_t n_items,
                      const int32_t *output_items, const int32_t *back,
                      const rk_draw *draws, int32_t n_outputs, rk_pick *picks,
                      rk_error *err);

/* ---- session.c ----------------------------------------------------------- */

rk_status rk_session_check_branch(const rk_branch *branch, rk_error *err);
rk_status rk_session_check_tokens(const rk_session *s, const char *field,
                                  const int32_t *tokens, int32_t n_tokens,
                                  int64_t n_before, rk_error *err);
/* A row whose logits were NaN is an error that names branch and position. */
rk_status rk_session_check_pick(const rk_pick *pick, const rk_branch *branch,
                                int32_t position, rk_error *err);
/* That error; what: "logits". */
rk_status rk_session_fail_nan(const char *what, const rk_branch *branch,
                              int32_t position, rk_error *err);

/* ---- peek.c -------------------------------------------------------------- */

/* Open a step with one row: the branch's last token, all KV in place. */
rk_status rk_session_peek(rk_session *s, rk_branch *branch, rk_error *err);

/* ---- scheduler.c --------------------------------------------------------- */

void rk_scheduler_free(rk_scheduler *scheduler);
/* The branch is about to go: retire its request, forget it in records. */
void rk_scheduler_forget(rk_session *s, rk_branch *branch);
/* Outside a step exactly the branches of running requests are pinned, and
 * those of requests that have not ended are busy. */
rk_status rk_scheduler_check(const rk_session *s, rk_error *err);

#endif
