/* Verification (CGEE): is this answer correct, YES or NO?
 *
 * A temporary child of each branch takes the prompt; all of them run in one
 * batch and are thrown away. score = p(yes) / (p(yes) + p(no)), from float32
 * logits of the two tokens alone.
 *
 * Three savings, in the order in which they act: level 1 and contenders (no
 * verification at all, or fewer branches), the bound (branches that cannot win
 * any more), level 2 (a branch leaves the pass between two layers, its rows
 * leave the batch, the others go on unchanged).
 */
#include <math.h>
#include <stdlib.h>

#include "branches.h"
#include "step.h"
#include "verify.h"

static double sigmoid(double x)
{
    return x >= 0 ? 1.0 / (1.0 + exp(-x)) : exp(x) / (1.0 + exp(x));
}

/* Entropy of (p, 1 - p) in nats. */
static double binary_entropy(double p)
{
    double q = 1.0 - p;
    return (p > 0 ? -p * log(p) : 0.0) + (q > 0 ? -q * log(q) : 0.0);
}

/* log(1 + e^x) */
static double softplus(double x)
{
    return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x));
}

/* One batch: children[i] is open as item i; places[i]: index of its verdict. */
typedef struct pass {
    rk_session *s;
    const rk_verification *v;
    rk_branch *const *branches; /* (n,) that are verified */
    rk_verdict *verdicts;       /* (n,) of this pass */
    int32_t *places;            /* (n,) verdict of item i of the open step */
    int32_t *keep;              /* (n,) scratch */
    double *previous; /* (n,) entropy at the check before, by verdict */
    float *answers;   /* (n, 2) by item */
    int32_t n;
} pass;

static void last_rows(const pass *p)
{
    const rk_step *step = &p->s->step;
    for (int32_t i = 0; i < step->n_items; i++) {
        step->rows[i] =
            step->first_rows[i] + step->items[i].end - step->items[i].begin - 1;
        step->draws[i] = (rk_draw){.forced = p->v->yes};
    }
}

static rk_status read_answers(const pass *p, bool norm, rk_error *err)
{
    const int32_t ids[2] = {p->v->yes, p->v->no};
    last_rows(p);
    return rk_forward_answer(&p->s->forward, p->s->step.rows,
                             p->s->step.n_items, norm, ids, p->answers, err);
}

/* The whole distribution at the open items' last rows into step.picks. */
static rk_status read_distribution(const pass *p, bool norm, rk_error *err)
{
    last_rows(p);
    return rk_forward_pick(&p->s->forward, p->s->step.rows, p->s->step.draws,
                           p->s->step.n_items, norm, p->s->step.picks, err);
}

/* Score item i as it stands after `layers` layers. */
static rk_status settle(const pass *p, int32_t i, int32_t layers,
                        bool with_mass, rk_error *err)
{
    rk_verdict *verdict = &p->verdicts[p->places[i]];
    const rk_branch *branch = p->branches[p->places[i]];
    const rk_pick *pick = &p->s->step.picks[i];
    double yes = p->answers[2 * i], no = p->answers[2 * i + 1];
    if (isnan(yes - no) || (with_mass && pick->token < 0)) {
        return rk_session_check_pick(
            &(rk_pick){.token = -1}, branch,
            rk_look(branch)->n_tokens + p->v->n_prompt - 1, err);
    }
    verdict->outcome = RK_VERIFIED;
    verdict->yes_logit = (float)yes;
    verdict->no_logit = (float)no;
    verdict->score = sigmoid(yes - no);
    verdict->layers = layers;
    verdict->mass =
        with_mass ? fmin(1.0, exp((double)pick->logprob + softplus(no - yes)))
                  : NAN;
    return RK_OK;
}

/* Level 2 after layer `layer` (from 1): who is sure leaves. */
static rk_status lens(pass *p, int32_t layer, rk_error *err)
{
    const rk_cgee *cgee = &p->v->cgee;
    const rk_step *step = &p->s->step;
    int32_t n_layers = p->s->model.config.n_layers, n_keep = 0;
    bool full = p->v->lens == RK_LENS_FULL;
    rk_cgee scaled = *cgee;
    if (!full) {
        scaled.theta *= log(2.0); /* the answer lens counts in ln 2 */
        scaled.epsilon *= log(2.0);
    }
    rk_status status = read_answers(p, p->v->lens_norm, err);
    if (status == RK_OK && full) {
        status = read_distribution(p, p->v->lens_norm, err);
    }
    for (int32_t i = 0; i < step->n_items && status == RK_OK; i++) {
        double score =
            sigmoid((double)p->answers[2 * i] - (double)p->answers[2 * i + 1]);
        double entropy =
            full ? (double)step->picks[i].entropy : binary_entropy(score);
        double *previous = &p->previous[p->places[i]];
        if (rk_cgee_exit(&scaled, layer, n_layers, entropy, *previous)) {
            status = settle(p, i, layer, full, err);
            p->s->stats.exits++;
        } else {
            p->keep[n_keep++] = i;
        }
        *previous = entropy;
    }
    if (status != RK_OK || n_keep == step->n_items) {
        return status;
    }
    for (int32_t i = 0; i < n_keep; i++) {
        p->places[i] = p->places[p->keep[i]];
    }
    return rk_step_shrink(p->s, p->keep, n_keep, err);
}

static rk_status run_layers(pass *p, rk_error *err)
{
    rk_session *s = p->s;
    int32_t n_layers = s->model.config.n_layers;
    bool looking = p->v->shortcuts && p->v->lens != RK_LENS_NONE;
    for (int32_t layer = 1; layer <= n_layers && s->step.n_items > 0; layer++) {
        rk_status status = rk_step_layers(s, layer - 1, layer, NULL, err);
        if (status == RK_OK && looking &&
            rk_cgee_check(&p->v->cgee, layer, n_layers)) {
            status = lens(p, layer, err);
        }
        if (status != RK_OK) {
            return status;
        }
    }
    rk_status status = RK_OK;
    if (s->step.n_items > 0) {
        status = read_answers(p, true, err);
    }
    if (s->step.n_items > 0 && status == RK_OK) {
        status = read_distribution(p, true, err);
    }
    for (int32_t i = 0; i < s->step.n_items && status == RK_OK; i++) {
        status = settle(p, i, n_layers, true, err);
    }
    return status;
}

static rk_status run_pass(pass *p, rk_branch **children, rk_error *err)
{
    rk_session *s = p->s;
    for (int32_t i = 0; i < p->n; i++) {
        s->step.items[i] =
            (rk_item){children[i], rk_look(children[i])->n_computed,
                      rk_look(children[i])->n_tokens, true};
        p->places[i] = i;
        p->previous[i] = NAN;
    }
    rk_status status = rk_step_open(s, s->step.items, p->n, NULL, err);
    if (status == RK_OK) {
        s->stats.tokens_computed += s->step.batch.n_rows;
        status = run_layers(p, err);
        rk_step_close(s, false); /* a verification leaves nothing behind */
    }
    return status;
}

/* Verify n branches by their children in one pass; they fit in a step. */
static rk_status verify_together(rk_session *s, rk_branch *const *branches,
                                 rk_branch **children, int32_t n,
                                 const rk_verification *v, rk_verdict *verdicts,
                                 rk_error *err)
{
    size_t count = (size_t)n;
    pass p = {
        .s = s,
        .v = v,
        .branches = branches,
        .verdicts = verdicts,
        .places = calloc(count, sizeof *p.places),
        .keep = calloc(count, sizeof *p.keep),
        .previous = calloc(count, sizeof *p.previous),
        .answers = calloc(2 * count, sizeof *p.answers),
        .n = n,
    };
    rk_status status = RK_OK;
    if (p.places == NULL || p.keep == NULL || p.previous == NULL ||
        p.answers == NULL) {
        status = rk_fail(err, RK_ENOMEM, "no memory to verify");
    } else {
        status = run_pass(&p, children, err);
    }
    free(p.places);
    free(p.keep);
    free(p.previous);
    free(p.answers);
    return status;
}

/* A pinned child with the prompt appended; only what fits one step is left to
 * compute. */
static rk_status make_child(rk_session *s, rk_branch **out, rk_branch *branch,
                            const rk_verification *v, rk_error *err)
{
    int32_t room = s->options.step_tokens - v->n_prompt;
    rk_branch *child = NULL;
    rk_status status = RK_OK;
    if (rk_look(branch)->n_tokens - rk_look(branch)->n_computed >
        (room > 1 ? room / 4 : 0)) {
        /* Evicted or never computed: worth keeping on the branch itself. */
        status = rk_session_compute(s, &branch, 1, err);
    }
    if (status == RK_OK) {
        status =
            rk_tree_fork(&s->tree, &child, branch, rk_look(branch)->n_tokens,
                         v->prompt, v->n_prompt, 0, err);
    }
    if (status != RK_OK) {
        return status;
    }
    rk_branch_pin(child); /* others must not evict what was counted on */
    int32_t first = rk_look(child)->n_tokens - s->options.step_tokens;
    if (first > rk_look(child)->n_computed) {
        /* A prompt longer than a step: its head goes ahead, in chunks. */
        int32_t end = rk_branch_end(child, first);
        status = rk_session_compute(s, &child, 1, err);
        rk_branch_end(child, end);
    }
    if (status != RK_OK) {
        rk_tree_drop(&s->tree, child);
        return status;
    }
    *out = child;
    return RK_OK;
}

/* Children of branches[0 .. n) as far as rows and blocks suffice for all of
 * them at once; *made: how many, one at least. */
static rk_status make_children(rk_session *s, rk_branch **children,
                               rk_branch *const *branches, int32_t n,
                               const rk_verification *v, int32_t *made,
                               rk_error *err)
{
    int32_t rows = 0;
    for (*made = 0; *made < n; ++*made) {
        rk_branch *child = NULL;
        rk_status status = make_child(s, &child, branches[*made], v, err);
        if (status != RK_OK) {
            return status == RK_ECAPACITY && *made > 0 ? RK_OK : status;
        }
        rows += rk_look(child)->n_tokens - rk_look(child)->n_computed;
        if (rows > s->options.step_tokens && *made > 0) {
            rk_tree_drop(&s->tree, child);
            break;
        }
        children[*made] = child;
    }
    return RK_OK;
}

/* Verify n branches in as many passes as rows and blocks want. */
static rk_status verify_batch(rk_session *s, rk_branch *const *branches,
                              int32_t n, const rk_verification *v,
                              rk_verdict *verdicts, rk_error *err)
{
    rk_branch **children = calloc((size_t)n, sizeof(rk_branch *));
    if (children == NULL) {
        return rk_fail(err, RK_ENOMEM, "no memory to verify");
    }
    rk_status status = RK_OK;
    int32_t limit = n;
    for (int32_t done = 0, made; done < n && status == RK_OK; done += made) {
        int32_t most = limit < n - done ? limit : n - done;
        status =
            make_children(s, children, branches + done, most, v, &made, err);
        if (status == RK_OK) {
            status = verify_together(s, branches + done, children, made, v,
                                     verdicts + done, err);
        }
        for (int32_t i = 0; i < made; i++) {
            rk_tree_drop(&s->tree, children[i]);
        }
        if (status == RK_ECAPACITY && made > 1) {
            limit = made / 2; /* fewer at a time may fit */
            made = 0;
            status = RK_OK;
        }
    }
    free(children);
    return status;
}

/* Verify branches[order[0 .. n)]. */
static rk_status verify_ordered(rk_session *s, rk_branch *const *branches,
                                const int32_t *order, int32_t n,
                                const rk_verification *v, rk_verdict *verdicts,
                                rk_error *err)
{
    rk_branch **some = calloc((size_t)n, sizeof(rk_branch *));
    rk_verdict *found = calloc((size_t)n, sizeof *found);
    rk_status status = some != NULL && found != NULL
                           ? RK_OK
                           : rk_fail(err, RK_ENOMEM, "no memory to verify");
    for (int32_t i = 0; i < n && status == RK_OK; i++) {
        some[i] = branches[order[i]];
    }
    if (status == RK_OK) {
        status = verify_batch(s, some, n, v, found, err);
    }
    for (int32_t i = 0; i < n && status == RK_OK; i++) {
        verdicts[order[i]] = found[i];
    }
    free(some);
    free(found);
    return status;
}

static rk_outcome outcome_of(rk_skip skip)
{
    switch (skip) {
    case RK_SKIP_LEAD:
        return RK_SKIPPED_LEAD;
    case RK_SKIP_RELATIVE_LEAD:
        return RK_SKIPPED_RELATIVE_LEAD;
    default:
        return RK_SKIPPED_ONE_CONTENDER;
    }
}

/* Contenders in order of confidence, a batch at a time, until the bound says
 * that nobody left can win. */
static rk_status verify_in_order(rk_session *s, rk_branch *const *branches,
                                 int32_t n, const rk_verification *v,
                                 const double *confidence, int32_t *order,
                                 rk_verdict *verdicts, rk_error *err)
{
    int32_t n_contenders = n;
    if (v->shortcuts) {
        rk_cgee_order(confidence, n, order);
        rk_skip skip =
            rk_cgee_skip(&v->cgee, confidence, order, n, &n_contenders);
        if (skip != RK_SKIP_NO) {
            for (int32_t i = 0; i < n; i++) {
                verdicts[i].outcome = outcome_of(skip);
            }
            return RK_OK;
        }
    }
    double best = NAN;
    rk_status status = RK_OK;
    for (int32_t i = 0, size; i < n_contenders && status == RK_OK; i += size) {
        size = v->shortcuts ? v->cgee.verify_batch : n;
        size = size < n_contenders - i ? size : n_contenders - i;
        /* The order falls: the first that cannot win ends it. */
        int32_t able = 0;
        while (able < size &&
               (!v->shortcuts ||
                rk_cgee_can_win(confidence[order[i + able]], best))) {
            able++;
        }
        if (able > 0) {
            status =
                verify_ordered(s, branches, order + i, able, v, verdicts, err);
        }
        for (int32_t j = 0; j < size; j++) {
            int32_t b = order[i + j];
            if (j >= able) {
                verdicts[b].outcome = RK_BOUND;
            } else if (status == RK_OK) {
                best =
                    fmax(best, rk_cgee_mark(verdicts[b].score, confidence[b]));
            }
        }
    }
    return status;
}

static void count(rk_session *s, int32_t n, const rk_verdict *verdicts)
{
    int32_t n_layers = s->model.config.n_layers;
    bool any = false;
    for (int32_t i = 0; i < n; i++) {
        s->stats.layers_run += verdicts[i].layers;
        s->stats.layers_saved += n_layers - verdicts[i].layers;
        any = any || verdicts[i].outcome == RK_VERIFIED;
    }
    s->stats.verifications += any;
    s->stats.verifications_skipped += !any;
}

static rk_status check(rk_session *s, rk_branch *const *branches, int32_t n,
                       const rk_verification *v, rk_error *err)
{
    const int32_t ids[2] = {v->yes, v->no};
    rk_status status = rk_session_check_tokens(s, "yes, no", ids, 2, 0, err);
    if (status != RK_OK) {
        return status;
    }
    if (v->yes == v->no) {
        return rk_fail(err, RK_EVALUE, "yes and no are the same token %d",
                       (int)v->yes);
    }
    if (v->n_prompt < 1) {
        return rk_fail(err, RK_EVALUE,
                       "prompt: a verification needs at least one token");
    }
    for (int32_t i = 0; i < n && status == RK_OK; i++) {
        status = rk_session_check_branch(branches[i], err);
        if (status == RK_OK) {
            status =
                rk_session_check_tokens(s, "prompt", v->prompt, v->n_prompt,
                                        rk_look(branches[i])->n_tokens, err);
        }
    }
    return status;
}

rk_status rk_session_verify(rk_session *s, rk_branch *const *branches,
                            int32_t n, const rk_verification *v,
                            rk_verdict *verdicts, rk_error *err)
{
    if (n < 1) {
        return RK_OK;
    }
    rk_status status = check(s, branches, n, v, err);
    if (status != RK_OK) {
        return status;
    }
    double *confidence = calloc((size_t)n, sizeof *confidence);
    int32_t *order = calloc((size_t)n, sizeof *order);
    if (confidence == NULL || order == NULL) {
        status = rk_fail(err, RK_ENOMEM, "no memory to verify");
    } else {
        for (int32_t i = 0; i < n; i++) {
            /* A branch that generated nothing is as sure as can be. */
            double known = rk_look(branches[i])->confidence;
            confidence[i] = isnan(known) ? 1.0 : known;
            order[i] = i;
            verdicts[i] = (rk_verdict){.outcome = RK_NOT_CONTENDER,
                                       .score = NAN,
                                       .mass = NAN,
                                       .yes_logit = NAN,
                                       .no_logit = NAN};
        }
        status = verify_in_order(s, branches, n, v, confidence, order, verdicts,
                                 err);
    }
    if (status == RK_OK) {
        count(s, n, verdicts);
    }
    free(confidence);
    free(order);
    return status;
}
