/* Requests: what they are, and what becomes of their tokens.
 *
 * A request waits, runs and ends; turns.c says when. Requests of one group (one
 * call) take turns as one and stop together under CGEE: their records stay
 * until the last of them has ended. A request of no group is the only one of
 * its own.
 *
 * Records stand in an array in the order in which they came, so their ids rise
 * and one is found by halving; all that a call or a step does with n requests
 * takes n steps or n log n.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "branches.h"
#include "scheduler.h"

/* ---- life ---------------------------------------------------------------- */

static void let_go(rk_request *request)
{
    if (request->branch != NULL) {
        rk_branch_unname(request->branch);
        request->branch = NULL;
    }
}

static void request_free(rk_request *request)
{
    let_go(request);
    rk_stops_free(&request->stops);
    free(request);
}

/* Free the records of groups that have ended. Between steps: within one they
 * are gone through. */
static void sweep(rk_scheduler *scheduler)
{
    int32_t n = 0;
    for (int32_t i = 0; scheduler->litter && i < scheduler->n; i++) {
        rk_request *r = scheduler->requests[i];
        rk_group *group = r->group;
        if (group->n_active > 0) {
            scheduler->requests[n++] = r;
            continue;
        }
        if (r == group->last) {
            free(group);
        }
        request_free(r);
    }
    scheduler->n = scheduler->litter ? n : scheduler->n;
    scheduler->litter = false;
}

void rk_scheduler_free(rk_scheduler *scheduler)
{
    for (int32_t i = 0; i < scheduler->n; i++) {
        scheduler->requests[i]->group->n_active = 0;
    }
    scheduler->litter = true;
    sweep(scheduler);
    free(scheduler->requests);
    free(scheduler->events);
    free(scheduler->confidence);
    free(scheduler->rows);
    *scheduler = (rk_scheduler){0};
}

/* Room for one more request, so that a step allocates nothing. */
static rk_status make_room(rk_scheduler *scheduler, rk_error *err)
{
    if (scheduler->n < scheduler->capacity) {
        return RK_OK;
    }
    size_t wanted = 2 * ((size_t)scheduler->n + 1);
    rk_request **requests =
        realloc(scheduler->requests, wanted * sizeof(rk_request *));
    if (requests != NULL) {
        scheduler->requests = requests;
    }
    rk_token *events = realloc(scheduler->events, 2 * wanted * sizeof *events);
    if (events != NULL) {
        scheduler->events = events;
    }
    double *confidence =
        realloc(scheduler->confidence, wanted * sizeof *confidence);
    if (confidence != NULL) {
        scheduler->confidence = confidence;
    }
    int32_t *rows = realloc(scheduler->rows, 2 * wanted * sizeof *rows);
    if (rows != NULL) {
        scheduler->rows = rows;
    }
    if (requests == NULL || events == NULL || confidence == NULL ||
        rows == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a request");
    }
    scheduler->capacity = (int32_t)wanted;
    return RK_OK;
}

/* The group of that id, which is found at once by all but its first request;
 * a new one where there is none. NULL: no memory. */
static rk_group *group_of(const rk_scheduler *scheduler, uint64_t id)
{
    for (int32_t i = scheduler->n - 1; id != 0 && i >= 0; i--) {
        if (scheduler->requests[i]->group->id == id) {
            return scheduler->requests[i]->group;
        }
    }
    rk_group *group = calloc(1, sizeof *group);
    if (group != NULL) {
        group->id = id;
    }
    return group;
}

/* There is room for it. */
static void request_link(rk_scheduler *scheduler, rk_request *request,
                         rk_group *group)
{
    *(group->last != NULL ? &group->last->peer : &group->first) = request;
    group->last = request;
    group->n_active++;
    request->group = group;
    scheduler->requests[scheduler->n++] = request;
}

rk_status rk_session_submit(rk_session *s, rk_branch *branch,
                            const rk_generation_options *options,
                            uint64_t group_id, uint64_t *id, rk_error *err)
{
    rk_scheduler *scheduler = &s->scheduler;
    rk_status status = rk_session_check_branch(branch, err);
    if (status != RK_OK) {
        return status;
    }
    if (options->n_stop_strings > 0 && options->token_bytes == NULL) {
        return rk_fail(err, RK_EVALUE,
                       "stop: stop strings need a tokenizer, and this session "
                       "has none: pip install 'rksc[hf]' for the model's own, "
                       "or pass tokenizer=");
    }
    sweep(scheduler);
    rk_request *request = calloc(1, sizeof *request);
    if (request == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory for a request");
    }
    if ((status = rk_stops_create(&request->stops, options,
                                  s->model.config.vocab_size, err)) ||
        (status = make_room(scheduler, err))) {
        request_free(request);
        return status;
    }
    rk_group *group = group_of(scheduler, group_id);
    if (group == NULL) {
        request_free(request);
        return rk_fail(err, RK_ENOMEM, "no memory for a request");
    }
    request->id = *id = ++scheduler->next_id;
    request->branch = branch;
    request->options = *options;
    request->confidence = NAN;
    request_link(scheduler, request, group);
    rk_branch_submit(branch, request->id);
    return RK_OK;
}

/* ---- ends ---------------------------------------------------------------- */

static void retire(rk_session *s, rk_request *request, rk_finish finish)
{
    rk_turns_release(request);
    request->finish = finish;
    s->scheduler.litter |= --request->group->n_active == 0;
    if (request->branch != NULL) {
        rk_branch_retire(request->branch);
        if (!isnan(request->confidence)) {
            rk_branch_set_confidence(request->branch, request->confidence);
        }
    }
    s->scheduler.stalled = false;
}

static rk_request *request_find(const rk_scheduler *scheduler, uint64_t id)
{
    int32_t low = 0, high = scheduler->n;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (scheduler->requests[middle]->id < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < scheduler->n && scheduler->requests[low]->id == id
               ? scheduler->requests[low]
               : NULL;
}

void rk_session_cancel(rk_session *s, uint64_t id)
{
    rk_request *request = request_find(&s->scheduler, id);
    if (request != NULL && rk_request_active(request)) {
        retire(s, request, RK_FINISH_CANCELLED);
    }
}

void rk_session_undo(rk_session *s, rk_branch *branch, int32_t n_tokens,
                     double confidence)
{
    rk_tree_truncate(&s->tree, branch, n_tokens);
    rk_branch_set_confidence(branch, confidence);
}

static void forget(rk_session *s, rk_request *request)
{
    if (rk_request_active(request)) {
        retire(s, request, RK_FINISH_CANCELLED);
    }
    let_go(request);
}

void rk_scheduler_forget(rk_session *s, rk_branch *branch)
{
    const rk_scheduler *scheduler = &s->scheduler;
    rk_request *newest = request_find(scheduler, rk_look(branch)->request);
    if (newest != NULL && newest->branch == branch) {
        forget(s, newest);
    }
    /* Rarely one more, that ended while others of its group run. */
    for (int32_t i = scheduler->n - 1; rk_look(branch)->n_requests > 0; i--) {
        if (scheduler->requests[i]->branch == branch) {
            forget(s, scheduler->requests[i]);
        }
    }
}

/* ---- what becomes of a token --------------------------------------------- */

static rk_token *event_add(rk_scheduler *scheduler, const rk_request *request,
                           const rk_pick *pick)
{
    rk_token *event = &scheduler->events[scheduler->n_events++];
    *event = (rk_token){
        .request = request->id,
        .token = -1,
        .stop_index = -1,
    };
    if (pick != NULL) {
        event->logprob = pick->logprob;
        event->top_prob = pick->top_prob;
        event->entropy = pick->entropy;
    }
    return event;
}

/* The picked token joins the branch. */
static rk_status take_token(rk_session *s, rk_request *request,
                            const rk_pick *pick, rk_error *err)
{
    rk_branch *branch = request->branch;
    const rk_generation_options *o = &request->options;
    rk_status status = rk_branch_append(branch, &pick->token, 1, err);
    if (status != RK_OK) {
        return status;
    }
    rk_token *event = event_add(&s->scheduler, request, pick);
    event->token = pick->token;
    request->n_new++;
    request->sum_top += pick->top_prob;
    request->confidence = request->sum_top / request->n_new;
    event->stop_index =
        rk_stops_take(&request->stops, pick->token, &event->stop_bytes);
    if (event->stop_index >= 0) {
        event->finish = RK_FINISH_STOP;
    } else if (request->n_new >= o->max_new_tokens ||
               rk_look(branch)->n_tokens >= s->model.config.max_positions) {
        event->finish = RK_FINISH_LENGTH;
    }
    if (event->finish != RK_FINISH_NONE) {
        retire(s, request, event->finish);
    }
    return RK_OK;
}

static rk_status take(rk_session *s, rk_request *request, const rk_pick *pick,
                      rk_error *err)
{
    rk_branch *branch = request->branch;
    rk_status status =
        rk_session_check_pick(pick, branch, rk_look(branch)->n_tokens - 1, err);
    if (status != RK_OK) {
        s->scheduler.blamed = request->id;
        return status;
    }
    int32_t stop = rk_stops_find_id(&request->stops, pick->token);
    if (stop < 0) {
        return take_token(s, request, pick, err);
    }
    rk_token *event = event_add(&s->scheduler, request, pick);
    event->stop_index = stop;
    event->finish = RK_FINISH_EOS;
    if (request->n_new == 0) {
        request->confidence = pick->top_prob;
    }
    retire(s, request, RK_FINISH_EOS);
    return RK_OK;
}

/* Nothing to compute: no tokens wanted, or no position left. */
static void end_idle(rk_session *s)
{
    for (int32_t i = 0; i < s->scheduler.n; i++) {
        rk_request *r = s->scheduler.requests[i];
        if (rk_request_active(r) &&
            (r->options.max_new_tokens == 0 ||
             rk_look(r->branch)->n_tokens >= s->model.config.max_positions)) {
            event_add(&s->scheduler, r, NULL)->finish = RK_FINISH_LENGTH;
            retire(s, r, RK_FINISH_LENGTH);
        }
    }
}

/* What has no room even alone is refused before others give way to it. */
static rk_status check_sizes(rk_session *s, rk_error *err)
{
    int32_t total = rk_kv_count(s->kv).total;
    for (int32_t i = 0; i < s->scheduler.n; i++) {
        const rk_request *r = s->scheduler.requests[i];
        int32_t needed =
            rk_request_active(r)
                ? rk_tree_blocks_of(&s->tree, rk_look(r->branch)->n_tokens)
                : 0;
        if (needed > total) {
            s->scheduler.blamed = r->id;
            return rk_fail(err, RK_ECAPACITY,
                           "kv_bytes: branch %llu needs %d KV blocks of %d "
                           "tokens, there are %d",
                           (unsigned long long)rk_look(r->branch)->id,
                           (int)needed, (int)s->options.block_tokens,
                           (int)total);
        }
    }
    return RK_OK;
}

/* CGEE while generating, by the settings of the group's first request. */
static bool leads(rk_scheduler *scheduler, const rk_group *group)
{
    const rk_cgee *cgee = &group->first->options.cgee;
    int32_t n = 0, steps = INT32_MAX;
    if (group->id == 0 || group->n_active == 0 || cgee->stop_top > 1.0) {
        return false;
    }
    for (const rk_request *r = group->first; r != NULL; r = r->peer) {
        scheduler->confidence[n++] = r->confidence;
        steps = rk_request_active(r) && r->n_new < steps ? r->n_new : steps;
    }
    return rk_cgee_stop(cgee, scheduler->confidence, n, steps);
}

/* The event that carries the end is one of its own. */
static void stop_early(rk_session *s)
{
    rk_scheduler *scheduler = &s->scheduler;
    for (int32_t i = 0; i < scheduler->n; i++) {
        const rk_group *group = scheduler->requests[i]->group;
        if (scheduler->requests[i] != group->first ||
            !leads(scheduler, group)) {
            continue;
        }
        for (rk_request *r = group->first; r != NULL; r = r->peer) {
            if (rk_request_active(r)) {
                event_add(scheduler, r, NULL)->finish = RK_FINISH_EARLY;
                retire(s, r, RK_FINISH_EARLY);
            }
        }
    }
}

/* ---- the step ------------------------------------------------------------ */

static rk_status run(rk_session *s, rk_request **owners, int32_t n_items,
                     rk_error *err)
{
    rk_step *step = &s->step;
    int32_t *outputs = s->outputs;
    int32_t n_outputs = 0;
    for (int32_t i = 0; i < n_items; i++) {
        const rk_branch *b = owners[i]->branch;
        if (step->items[i].end == rk_look(b)->n_tokens) {
            rk_draw draw = owners[i]->options.draw;
            draw.stream = rk_look(b)->stream;
            draw.position = rk_look(b)->n_tokens;
            draw.forced = -1;
            step->draws[n_outputs] = draw;
            outputs[n_outputs++] = i;
        }
    }
    rk_status status = rk_step_run(s, step->items, n_items, outputs, NULL,
                                   step->draws, n_outputs, step->picks, err);
    for (int32_t i = 0; i < n_outputs && status == RK_OK; i++) {
        status = take(s, owners[outputs[i]], &step->picks[i], err);
    }
    return status;
}

rk_status rk_session_step(rk_session *s, const rk_token **events,
                          int32_t *n_events, int32_t *n_active, rk_error *err)
{
    rk_scheduler *scheduler = &s->scheduler;
    rk_request **owners = s->owners;
    scheduler->n_events = 0;
    scheduler->blamed = 0;
    *n_active = 0;
    sweep(scheduler);
    end_idle(s);
    rk_status status = check_sizes(s, err);
    while (status == RK_OK) {
        int32_t n_items = rk_turns_choose(s, owners);
        if (n_items == 0) {
            break;
        }
        status = run(s, owners, n_items, err);
        if (status != RK_ECAPACITY || !rk_turns_preempt(scheduler)) {
            break;
        }
        status = rk_step_signal(s, err);
    }
    if (status == RK_OK) {
        stop_early(s);
    }
    *events = scheduler->events;
    *n_events = scheduler->n_events;
    for (int32_t i = 0; i < scheduler->n; i++) {
        *n_active += rk_request_active(scheduler->requests[i]);
    }
    return status;
}

uint64_t rk_session_blamed(const rk_session *s)
{
    return s->scheduler.blamed;
}

/* ---- books --------------------------------------------------------------- */

rk_status rk_scheduler_check(const rk_session *s, rk_error *err)
{
    int32_t n_busy, n_pins;
    rk_tree_count(&s->tree, &n_busy, &n_pins);
    for (int32_t i = 0; i < s->scheduler.n; i++) {
        const rk_request *r = s->scheduler.requests[i];
        const rk_branch *b = r->branch;
        if (r->running && (!rk_request_active(r) || b == NULL)) {
            return rk_fail(err, RK_ESTATE, "request %llu has ended and runs",
                           (unsigned long long)r->id);
        }
        if (rk_request_active(r) && (b == NULL || !rk_look(b)->busy ||
                                     rk_look(b)->pins != r->running)) {
            return rk_fail(err, RK_ESTATE, "request %llu has lost its branch",
                           (unsigned long long)r->id);
        }
        n_busy -= rk_request_active(r);
        n_pins -= r->running;
    }
    if (n_busy != 0 || n_pins != 0) {
        return rk_fail(err, RK_ESTATE,
                       "%d busy branches and %d pins are nobody's", (int)n_busy,
                       (int)n_pins);
    }
    return RK_OK;
}
