/* The lock of a session: fair, and one can look round while waiting for it.
 *
 * Whoever waits longest is next, so that a thread which gives the lock up
 * between two steps and takes it again does not starve the others. Pure C:
 * nothing here knows about Python or its GIL.
 */
#ifndef RKSC_PY_LOCK_H
#define RKSC_PY_LOCK_H

#include <pthread.h>
#include <stdbool.h>

typedef struct rk_waiter rk_waiter;

typedef struct rk_lock {
    pthread_mutex_t mutex; /* guards what follows; held for a few lines only */
    bool held;
    pthread_t owner; /* valid while held */
    rk_waiter *first, *last;
} rk_lock;

/* Asked every now and then while waiting; true: give up. */
typedef bool (*rk_lock_stop)(void *context);

/* 0, or an error number. */
int rk_lock_init(rk_lock *lock);
void rk_lock_destroy(rk_lock *lock); /* nobody holds it or waits */

/* Take the lock if it is free. Never waits for the holder. */
bool rk_lock_try(rk_lock *lock);

/* Wait for the lock. False when `stop` (may be NULL) ended the wait: then the
 * lock is not taken. `stop` runs with no place in the queue, so it may use the
 * lock itself. */
bool rk_lock_take(rk_lock *lock, rk_lock_stop stop, void *context);

/* Give it to the first who waits. */
void rk_lock_give(rk_lock *lock);

/* Does this thread hold it? */
bool rk_lock_mine(rk_lock *lock);
/* Does somebody wait for it? */
bool rk_lock_wanted(rk_lock *lock);

#endif
