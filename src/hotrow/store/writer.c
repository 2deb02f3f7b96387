// Rows to their places in the store and from there, by threads that know nothing of Python.
//
// Jobs are done one after the other, each by all threads, part by part. The caller does not wait.

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

enum { JOBS = 64, PART = 1024, AHEAD = 16, LINE = 64 };

typedef struct {
    char *store;
    uint64_t num_rows, row_bytes;
    const void *ids;  // -1: none
    int is_wide;      // ids of 8 bytes, not of 4
    int reads;        // from the store, not to it
    char *rows;
    uint64_t count;
} Job;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t more, done;
    Job jobs[JOBS];
    uint64_t asked, finished;  // jobs, since the beginning
    uint64_t begun;            // rows of the first one that is not finished
    int at_work;               // threads, at that one
    int ends;
    int64_t bad;  // an id that the store does not have, or -1
    int num_threads;
    pthread_t threads[];
} Writer;

static inline int64_t id_at(const Job *job, uint64_t i) {
    return job->is_wide ? ((const int64_t *)job->ids)[i] : ((const int32_t *)job->ids)[i];
}

#ifdef __SSE2__
// Past the caches: a row that is overwritten as a whole need not be read first.
static int can_stream(const Job *job) {
    return !job->reads && job->row_bytes % LINE == 0 && (uintptr_t)job->store % LINE == 0;
}

static void stream(char *there, const char *here, uint64_t bytes) {
    __m128i *to = (__m128i *)there;
    const __m128i *from = (const __m128i *)here;
    for (uint64_t i = 0; i < bytes / sizeof(__m128i); i++)
        _mm_stream_si128(to + i, _mm_loadu_si128(from + i));
}

static void end_stream(void) { _mm_sfence(); }
#else
static int can_stream(const Job *job) { return 0; }
static void stream(char *there, const char *here, uint64_t bytes) {}
static void end_stream(void) {}
#endif

static int64_t stream_part(const Job *job, uint64_t first, uint64_t last) {
    int64_t bad = -1;
    for (uint64_t i = first; i < last; i++) {
        int64_t id = id_at(job, i);
        if ((uint64_t)id < job->num_rows)
            stream(job->store + (uint64_t)id * job->row_bytes, job->rows + i * job->row_bytes,
                   job->row_bytes);
        else if (id != -1)
            bad = id;
    }
    end_stream();
    return bad;
}

static int64_t move_part(const Job *job, uint64_t first, uint64_t last) {
    if (can_stream(job)) return stream_part(job, first, last);
    int64_t bad = -1;
    for (uint64_t i = first; i < last; i++) {
        if (i + AHEAD < last && (uint64_t)id_at(job, i + AHEAD) < job->num_rows) {
            const char *later = job->store + (uint64_t)id_at(job, i + AHEAD) * job->row_bytes;
            for (uint64_t byte = 0; byte < job->row_bytes; byte += LINE)
                __builtin_prefetch(later + byte, 1);
        }
        int64_t id = id_at(job, i);
        if ((uint64_t)id < job->num_rows) {
            char *there = job->store + (uint64_t)id * job->row_bytes;
            char *here = job->rows + i * job->row_bytes;
            memcpy(job->reads ? here : there, job->reads ? there : here, job->row_bytes);
        } else if (id != -1)
            bad = id;
    }
    return bad;
}

static void *work(void *argument) {
    Writer *writer = argument;
    pthread_mutex_lock(&writer->lock);
    for (;;) {
        Job *job = &writer->jobs[writer->finished % JOBS];
        int there_is = writer->finished < writer->asked && writer->begun < job->count;
        if (!there_is) {
            if (writer->ends && writer->finished == writer->asked) break;
            pthread_cond_wait(&writer->more, &writer->lock);
            continue;
        }
        uint64_t first = writer->begun, last = first + PART;
        if (last > job->count) last = job->count;
        writer->begun = last;
        writer->at_work++;
        pthread_mutex_unlock(&writer->lock);
        int64_t bad = move_part(job, first, last);
        pthread_mutex_lock(&writer->lock);
        if (bad != -1) writer->bad = bad;
        writer->at_work--;
        if (writer->at_work == 0 && writer->begun == job->count) {
            writer->finished++;
            writer->begun = 0;
            pthread_cond_broadcast(&writer->done);
            pthread_cond_broadcast(&writer->more);
        }
    }
    pthread_mutex_unlock(&writer->lock);
    return NULL;
}

void hotrow_end(Writer *writer) {
    pthread_mutex_lock(&writer->lock);
    writer->ends = 1;
    pthread_cond_broadcast(&writer->more);
    pthread_mutex_unlock(&writer->lock);
    for (int i = 0; i < writer->num_threads; i++) pthread_join(writer->threads[i], NULL);
    free(writer);
}

// NULL if the system gives no thread.
Writer *hotrow_begin(int num_threads) {
    Writer *writer = calloc(1, sizeof(Writer) + (size_t)num_threads * sizeof(pthread_t));
    if (writer == NULL) return NULL;
    pthread_mutex_init(&writer->lock, NULL);
    pthread_cond_init(&writer->more, NULL);
    pthread_cond_init(&writer->done, NULL);
    writer->bad = -1;
    while (writer->num_threads < num_threads) {
        if (pthread_create(&writer->threads[writer->num_threads], NULL, work, writer)) break;
        writer->num_threads++;
    }
    if (writer->num_threads > 0) return writer;
    free(writer);
    return NULL;
}

// The number of the job, for hotrow_wait; there must be at least one row.
uint64_t hotrow_move(Writer *writer, int reads, char *store, uint64_t num_rows, uint64_t row_bytes,
                     const void *ids, int is_wide, char *rows, uint64_t count) {
    pthread_mutex_lock(&writer->lock);
    while (writer->asked - writer->finished == JOBS)
        pthread_cond_wait(&writer->done, &writer->lock);
    writer->jobs[writer->asked % JOBS] = (Job){store, num_rows, row_bytes, ids,
                                                is_wide, reads, rows, count};
    uint64_t number = ++writer->asked;
    pthread_cond_broadcast(&writer->more);
    pthread_mutex_unlock(&writer->lock);
    return number;
}

uint64_t hotrow_finished(Writer *writer) {
    pthread_mutex_lock(&writer->lock);
    uint64_t finished = writer->finished;
    pthread_mutex_unlock(&writer->lock);
    return finished;
}

// Returns a bad id that any job had so far, or -1.
int64_t hotrow_wait(Writer *writer, uint64_t number) {
    pthread_mutex_lock(&writer->lock);
    while (writer->finished < number) pthread_cond_wait(&writer->done, &writer->lock);
    int64_t bad = writer->bad;
    pthread_mutex_unlock(&writer->lock);
    return bad;
}

// Adds to counts at many places, by the thread that calls: each is a miss of every cache, and what
// is asked for ahead is on its way meanwhile.
void hotrow_count(int64_t *counts, const int64_t *places, uint64_t count, int64_t times) {
    for (uint64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) __builtin_prefetch(counts + places[i + AHEAD], 1);
        counts[places[i]] += times;
    }
}
