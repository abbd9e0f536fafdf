/* A small pool that splits one job into numbered parts.
 *
 * Parts are taken one by one from a counter, by the caller too: a thread that the system does not run delays nobody,
 * which static splitting with a barrier does not give. A thread without work spins for some microseconds (the next job
 * of a step follows at once), then sleeps. When the pool serves another caller, the job runs on the calling thread. */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

typedef void (*part_function)(const void *job, int64_t part);

enum { MAX_THREADS = 256, SPINS = 4000, PART_BITS = 24, MAX_PARTS = (1 << PART_BITS) - 1 };

static struct {
    part_function run;
    const void *job;
    _Atomic uint64_t ticket;  /* generation (16 bits) | number of parts (24) | next part (24): one word, so that a late
                                 thread can never take a part of one job with the size of another */
    _Atomic int64_t unfinished;
    _Atomic int sleeping;
    _Atomic int num_threads;  /* that should run, the caller included */
    int num_started;
    pthread_mutex_t owner;    /* held by the caller whose job it is */
    pthread_mutex_t lock;     /* for the conditions */
    pthread_cond_t published;
    pthread_cond_t finished;
} pool = {
    .num_threads = 1,
    .num_started = 1,
    .owner = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .published = PTHREAD_COND_INITIALIZER,
    .finished = PTHREAD_COND_INITIALIZER,
};

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Runs one part if there is one. */
static int take_part(void) {
    uint64_t ticket = atomic_load(&pool.ticket);
    do {
        if ((ticket & MAX_PARTS) >= (ticket >> PART_BITS & MAX_PARTS)) return 0;
    } while (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1));
    pool.run(pool.job, (int64_t)(ticket & MAX_PARTS));
    if (atomic_fetch_sub(&pool.unfinished, 1) == 1) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_signal(&pool.finished);
        pthread_mutex_unlock(&pool.lock);
    }
    return 1;
}

static int has_parts(void) {
    const uint64_t ticket = atomic_load(&pool.ticket);
    return (ticket & MAX_PARTS) < (ticket >> PART_BITS & MAX_PARTS);
}

static void sleep_until_published(intptr_t index) {
    pthread_mutex_lock(&pool.lock);
    atomic_fetch_add(&pool.sleeping, 1);
    while (!has_parts() || index >= atomic_load(&pool.num_threads)) pthread_cond_wait(&pool.published, &pool.lock);
    atomic_fetch_sub(&pool.sleeping, 1);
    pthread_mutex_unlock(&pool.lock);
}

static void *work(void *index) {
    for (int spins = 0;;) {
        if ((intptr_t)index < atomic_load(&pool.num_threads) && take_part()) {
            spins = 0;
        } else if (++spins < SPINS) {
            pause_briefly();
        } else {
            sleep_until_published((intptr_t)index);
            spins = 0;
        }
    }
    return NULL;
}

static void publish(part_function run, const void *job, int64_t num_parts) {
    pool.run = run;
    pool.job = job;
    atomic_store(&pool.unfinished, num_parts);
    const uint64_t generation = (atomic_load(&pool.ticket) >> 2 * PART_BITS) + 1;
    atomic_store(&pool.ticket, generation << 2 * PART_BITS | (uint64_t)num_parts << PART_BITS);
    if (atomic_load(&pool.sleeping) > 0) {
        pthread_mutex_lock(&pool.lock);
        pthread_cond_broadcast(&pool.published);
        pthread_mutex_unlock(&pool.lock);
    }
}

static void wait_until_finished(void) {
    for (int spins = 0; spins < SPINS; spins++) {
        if (atomic_load(&pool.unfinished) == 0) return;
        pause_briefly();
    }
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.unfinished) > 0) pthread_cond_wait(&pool.finished, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* Calls run(job, part) for every part in [0, num_parts), in any order, and returns when all are done. */
static void parallel(part_function run, const void *job, int64_t num_parts) {
    if (num_parts < 2 || num_parts > MAX_PARTS || atomic_load(&pool.num_threads) == 1
        || pthread_mutex_trylock(&pool.owner) != 0) {
        for (int64_t part = 0; part < num_parts; part++) run(job, part);
        return;
    }
    publish(run, job, num_parts);
    while (take_part()) {}
    wait_until_finished();
    pthread_mutex_unlock(&pool.owner);
}

/* Returns the number of threads that will run, the caller included. */
static int set_num_threads(int num_threads) {
    pthread_mutex_lock(&pool.owner);
    if (num_threads > MAX_THREADS) num_threads = MAX_THREADS;
    while (pool.num_started < num_threads) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)pool.num_started) != 0) break;
        pthread_detach(thread);
        pool.num_started++;
    }
    if (num_threads > pool.num_started) num_threads = pool.num_started;
    atomic_store(&pool.num_threads, num_threads);
    pthread_mutex_unlock(&pool.owner);
    return num_threads;
}
