/* A queue of waiters, each with its own condition; giving the lock up hands it
 * to the first of them without ever being free in between. */
#include "lock.h"

#include <errno.h>
#include <time.h>

#define LOOK_ROUND_NS 50000000L /* between two questions to `stop` */

struct rk_waiter {
    rk_waiter *next;
    pthread_cond_t condition;
    bool granted;
};

#ifdef __APPLE__ /* has no pthread_condattr_setclock */
#define WAIT_CLOCK CLOCK_REALTIME
#else
#define WAIT_CLOCK CLOCK_MONOTONIC
#endif

int rk_lock_init(rk_lock *lock)
{
    *lock = (rk_lock){0};
    return pthread_mutex_init(&lock->mutex, NULL);
}

void rk_lock_destroy(rk_lock *lock)
{
    pthread_mutex_destroy(&lock->mutex);
}

bool rk_lock_try(rk_lock *lock)
{
    bool taken;

    pthread_mutex_lock(&lock->mutex);
    taken = !lock->held;
    if (taken) {
        lock->held = true;
        lock->owner = pthread_self();
    }
    pthread_mutex_unlock(&lock->mutex);
    return taken;
}

static void waiter_init(rk_waiter *waiter)
{
    pthread_condattr_t attributes;

    *waiter = (rk_waiter){0};
    pthread_condattr_init(&attributes);
#ifndef __APPLE__
    pthread_condattr_setclock(&attributes, WAIT_CLOCK);
#endif
    pthread_cond_init(&waiter->condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void enqueue(rk_lock *lock, rk_waiter *waiter, bool in_front)
{
    waiter->next = in_front ? lock->first : NULL;
    if (lock->first == NULL) {
        lock->first = lock->last = waiter;
    } else if (in_front) {
        lock->first = waiter;
    } else {
        lock->last->next = waiter;
        lock->last = waiter;
    }
}

static void dequeue(rk_lock *lock, rk_waiter *waiter)
{
    rk_waiter **at = &lock->first, *before = NULL;

    while (*at != waiter) {
        before = *at;
        at = &before->next;
    }
    *at = waiter->next;
    if (lock->last == waiter) {
        lock->last = before;
    }
}

/* Wait until granted or until it is time to look round. Mutex held. */
static void wait_a_while(rk_lock *lock, rk_waiter *waiter, bool look_round)
{
    struct timespec until;
    int status = 0;

    clock_gettime(WAIT_CLOCK, &until);
    until.tv_nsec += LOOK_ROUND_NS;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_sec += 1;
        until.tv_nsec -= 1000000000L;
    }
    while (!waiter->granted && status != ETIMEDOUT) {
        status = look_round
                     ? pthread_cond_timedwait(&waiter->condition, &lock->mutex,
                                              &until)
                     : pthread_cond_wait(&waiter->condition, &lock->mutex);
    }
}

/* Ask `stop` out of the queue, then come back to its front or to a lock that
 * became free. Mutex held on entry and on return. */
static bool look_round(rk_lock *lock, rk_waiter *waiter, rk_lock_stop stop,
                       void *context)
{
    bool stopped;

    dequeue(lock, waiter);
    pthread_mutex_unlock(&lock->mutex);
    stopped = stop(context);
    pthread_mutex_lock(&lock->mutex);
    if (stopped) {
        return true;
    }
    if (!lock->held) {
        lock->held = true;
        waiter->granted = true;
    } else {
        enqueue(lock, waiter, true);
    }
    return false;
}

bool rk_lock_take(rk_lock *lock, rk_lock_stop stop, void *context)
{
    rk_waiter waiter;
    bool stopped = false;

    pthread_mutex_lock(&lock->mutex);
    if (!lock->held) {
        lock->held = true;
    } else {
        waiter_init(&waiter);
        enqueue(lock, &waiter, false);
        while (!waiter.granted && !stopped) {
            wait_a_while(lock, &waiter, stop != NULL);
            if (!waiter.granted) {
                stopped = look_round(lock, &waiter, stop, context);
            }
        }
        pthread_cond_destroy(&waiter.condition);
    }
    if (!stopped) {
        lock->owner = pthread_self();
    }
    pthread_mutex_unlock(&lock->mutex);
    return !stopped;
}

void rk_lock_give(rk_lock *lock)
{
    rk_waiter *next;

    pthread_mutex_lock(&lock->mutex);
    next = lock->first;
    if (next == NULL) {
        lock->held = false;
    } else {
        dequeue(lock, next);
        next->granted = true;
        /* Signalled under the mutex: the waiter's condition lives on its
         * stack and is gone as soon as it can run. The lock has no owner
         * until then, and it is not this thread's any more. */
        lock->owner = (pthread_t){0};
        pthread_cond_signal(&next->condition);
    }
    pthread_mutex_unlock(&lock->mutex);
}

bool rk_lock_mine(rk_lock *lock)
{
    bool mine;

    pthread_mutex_lock(&lock->mutex);
    mine = lock->held && pthread_equal(lock->owner, pthread_self());
    pthread_mutex_unlock(&lock->mutex);
    return mine;
}

bool rk_lock_wanted(rk_lock *lock)
{
    bool wanted;

    pthread_mutex_lock(&lock->mutex);
    wanted = lock->first != NULL;
    pthread_mutex_unlock(&lock->mutex);
    return wanted;
}
