/* Turns: whose rows go into the next step.
 *
 * The step_tokens rows of a step go to groups in equal shares
 * (policy/shares.h), however many requests a group has. Of its share a group
 * gives one row to each running request whose KV is up to date, fills the rest
 * with tokens that others still have to compute, and admits its waiting ones
 * in order.
 *
 * When blocks run out, the last running request of the group that has most of
 * them goes back to wait, and its KV may be evicted. Nobody is admitted then
 * until a request has ended, but for one of each group that has none running,
 * while another group has several to take back. The first group keeps one
 * running, so it always comes through.
 */
#include "policy/shares.h"
#include "scheduler.h"

/* Tokens that the next step can take of a request: the one whose row is drawn
 * from, or what is still to be computed. */
static int32_t wants(const rk_request *request)
{
    const rk_branch_facts *b = rk_look(request->branch);
    int32_t left = b->n_tokens - b->n_computed;
    return left > 1 ? left : 1;
}

/* The rows of one request in the next step, at most `room`. */
static rk_item next_item(const rk_request *request, int32_t room)
{
    const rk_branch_facts *b = rk_look(request->branch);
    if (b->n_computed == b->n_tokens) {
        return (rk_item){request->branch, b->n_tokens - 1, b->n_tokens, false};
    }
    int32_t n = wants(request);
    n = n < room ? n : room;
    return (rk_item){request->branch, b->n_computed, b->n_computed + n, true};
}

static void admit(rk_session *s, rk_request *request)
{
    request->running = true;
    request->group->n_running++;
    rk_branch_pin(request->branch);
    s->stats.tokens_reused += rk_tree_revive(&s->tree, request->branch);
}

/* The group of scheduler->requests[i] where that is its first request; NULL:
 * the group has been seen before. */
static rk_group *group_at(const rk_scheduler *scheduler, int32_t i)
{
    rk_group *group = scheduler->requests[i]->group;
    return scheduler->requests[i] == group->first ? group : NULL;
}

/* The group with most running requests, the last one on a tie; NULL: nobody
 * runs. */
static rk_group *largest(const rk_scheduler *scheduler)
{
    rk_group *found = NULL;
    for (int32_t i = 0; i < scheduler->n; i++) {
        rk_group *group = group_at(scheduler, i);
        if (group != NULL && group->n_running > 0 &&
            (found == NULL || group->n_running >= found->n_running)) {
            found = group;
        }
    }
    return found;
}

/* How many requests of a group may be admitted; crowded: some group has several
 * running ones. */
static int32_t newcomers(const rk_scheduler *scheduler, const rk_group *group,
                         bool crowded)
{
    if (!scheduler->stalled) {
        return INT32_MAX;
    }
    return crowded && group->n_running == 0 ? 1 : 0;
}

/* Rows that a group can use, at most `room`. */
static int32_t group_wants(const rk_group *group, int32_t n_new, int32_t room)
{
    int32_t n = 0;
    for (const rk_request *r = group->first; r != NULL; r = r->peer) {
        if (rk_request_active(r) && (r->running || n_new-- > 0)) {
            int32_t more = wants(r);
            n = more < room - n ? n + more : room;
        }
    }
    return n;
}

/* Add the items of a group, at most `room` rows, to the n that there are: those
 * that give a token first, then pieces of prompts. Returns the new n. */
static int32_t group_rows(rk_session *s, const rk_group *group, int32_t n_new,
                          int32_t room, rk_request **owners, int32_t n)
{
    for (int pass = 0; pass < 2; pass++) {
        for (rk_request *r = group->first; r != NULL && room > 0; r = r->peer) {
            if (!rk_request_active(r)) {
                continue;
            }
            if (r->running) {
                if ((wants(r) == 1) != (pass == 0)) {
                    continue;
                }
            } else if (pass == 0 || n_new-- <= 0) {
                continue;
            } else {
                admit(s, r);
            }
            owners[n] = r;
            s->step.items[n] = next_item(r, room);
            room -= s->step.items[n].end - s->step.items[n].begin;
            n++;
        }
    }
    return n;
}

int32_t rk_turns_choose(rk_session *s, rk_request **owners)
{
    rk_scheduler *scheduler = &s->scheduler;
    const rk_group *most = largest(scheduler);
    bool crowded = most != NULL && most->n_running > 1;
    int32_t *wanted = scheduler->rows, *granted = wanted + scheduler->n;
    int32_t n_groups = 0, first = -1, n = 0, room = s->options.step_tokens;
    for (int32_t i = 0; i < scheduler->n; i++) {
        const rk_group *group = group_at(scheduler, i);
        if (group != NULL) {
            if (first < 0 && group->first->id >= scheduler->turn) {
                first = n_groups;
            }
            int32_t n_new = newcomers(scheduler, group, crowded);
            wanted[n_groups++] = group_wants(group, n_new, room);
        }
    }
    first = first < 0 ? 0 : first;
    int32_t next = rk_shares_divide(granted, wanted, n_groups, room, first);
    for (int32_t i = 0, k = 0; i < scheduler->n; i++) {
        const rk_group *group = group_at(scheduler, i);
        if (group != NULL) {
            if (k == next) {
                scheduler->turn = group->first->id;
            }
            int32_t n_new = newcomers(scheduler, group, crowded);
            n = group_rows(s, group, n_new, granted[k++], owners, n);
        }
    }
    return n;
}

void rk_turns_release(rk_request *request)
{
    if (request->branch != NULL && request->running) {
        rk_branch_unpin(request->branch);
    }
    request->group->n_running -= request->running;
    request->running = false;
}

bool rk_turns_preempt(rk_scheduler *scheduler)
{
    const rk_group *group = largest(scheduler);
    rk_request *last = NULL;
    int32_t n_running = 0;
    for (int32_t i = 0; i < scheduler->n; i++) {
        rk_request *r = scheduler->requests[i];
        n_running += r->running;
        last = r->running && r->group == group ? r : last;
    }
    if (n_running == 1) {
        scheduler->blamed = last->id;
        return false;
    }
    rk_turns_release(last);
    scheduler->stalled = true;
    return true;
}
