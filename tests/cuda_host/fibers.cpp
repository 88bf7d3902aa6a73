/* Kernels on the host: the threads of a block are fibers of one thread.
 *
 * A fiber runs until it waits for others, so threads are as far apart as the
 * barriers let them be. Blocks run one after the other. Both in forward,
 * reverse or random order: what depends on an order shows in one of them.
 * Shared memory is poisoned when a block starts, and so is the target of an
 * asynchronous copy until the copy is waited for.
 */
#include "host.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "rk_port_host.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace
{

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t STACK = size_t(512) << 10;
#else
constexpr size_t STACK = size_t(64) << 10;
#endif
constexpr size_t PAGE = 4096;
constexpr size_t SHARED_BEFORE_ATTRIBUTE = size_t(48) << 10;
constexpr size_t MOST = 1024; /* threads of a block */

/* Nobody has written here: NaN as any float, a large number as any integer (-1
 * would hide in a sum). `to` is even. */
void poison(void *to, size_t bytes)
{
    auto p = static_cast<unsigned char *>(to);
    for (size_t i = 0; i < bytes; i++) {
        p[i] = i % 2 == 0 ? 0xff : 0x7f;
    }
}

/* ---- switching ----------------------------------------------------------- */

#if defined(__x86_64__)
struct context {
    void *stack_pointer;
};
extern "C" void rk_host_switch(void **save, void *load);
__asm__(".text\n.hidden rk_host_switch\n.globl rk_host_switch\n"
        ".type rk_host_switch, @function\nrk_host_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\n"
        "pushq %r15\nmovq %rsp, (%rdi)\nmovq %rsi, %rsp\npopq %r15\n"
        "popq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size rk_host_switch, .-rk_host_switch\n");

void prepare(context *c, char *stack, void (*entry)())
{
    void **top = reinterpret_cast<void **>(stack + STACK);
    top[-1] = nullptr;
    top[-2] = reinterpret_cast<void *>(entry);
    for (int i = 3; i <= 8; i++) {
        top[-i] = nullptr;
    }
    c->stack_pointer = top - 8;
}

void go(context *from, const context *to)
{
    rk_host_switch(&from->stack_pointer, to->stack_pointer);
}
#else
using context = ucontext_t;

void prepare(context *c, char *stack, void (*entry)())
{
    getcontext(c);
    c->uc_stack.ss_sp = stack;
    c->uc_stack.ss_size = STACK;
    c->uc_link = nullptr;
    makecontext(c, entry, 0);
}

void go(context *from, const context *to)
{
    swapcontext(from, to);
}
#endif

/* ---- the block that runs ------------------------------------------------- */

enum class state { ready, at_barrier, at_meeting, done };

struct copy {
    unsigned char *to;
    const void *from;
    bool valid;
};

struct fiber {
    context where;
    char *stack = nullptr;
    void *fake_stack = nullptr; /* AddressSanitizer's */
    state now = state::done;
    uint3 index;
    std::vector<std::vector<copy>> groups; /* committed, oldest first */
    std::vector<copy> open;
};

struct meeting {
    unsigned mask, arrived;
    rk_host_act *act;
    void *lanes[32];
};

struct block {
    const std::function<void()> *body;
    unsigned n_threads, at_barrier;
    rk_host_vote vote;
    int count, all, any, result; /* of the barrier's votes */
    size_t dynamic_bytes, shared_bytes;
    std::map<const void *, size_t> shared; /* offset of each static array */
    const char *fault;
};

context scheduler;
#if defined(__SANITIZE_ADDRESS__)
void *scheduler_fake_stack;
const void *scheduler_stack;
size_t scheduler_stack_bytes;
#endif
std::vector<fiber> fibers;
std::vector<std::vector<meeting>> warps;
fiber *current;
block running;
alignas(128) unsigned char shared_memory[host::SHARED];

void leave()
{
    fiber *me = current;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&me->fake_stack, scheduler_stack,
                                   scheduler_stack_bytes);
#endif
    go(&me->where, &scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(me->fake_stack, &scheduler_stack,
                                    &scheduler_stack_bytes);
#endif
}

void enter(fiber *f)
{
    current = f;
    threadIdx = f->index;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, f->stack, STACK);
#endif
    go(&scheduler, &f->where);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

/* A fiber runs one thread of a block after the other, for ever. */
void live()
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack,
                                    &scheduler_stack_bytes);
#endif
    for (;;) {
        (*running.body)();
        if (!current->open.empty() || !current->groups.empty()) {
            rk_host_fault("a thread ends with an asynchronous copy under way");
        }
        current->now = state::done;
        leave();
    }
}

void make_fibers(size_t n)
{
    fibers.reserve(MOST); /* they stay where they are */
    while (fibers.size() < n) {
        void *memory =
            mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            std::fprintf(stderr, "cuda-host: no memory for fibers\n");
            std::abort();
        }
        mprotect(memory, PAGE, PROT_NONE);
        fibers.emplace_back();
        fibers.back().stack = static_cast<char *>(memory) + PAGE;
        prepare(&fibers.back().where, fibers.back().stack, live);
    }
}

/* After a fault: what stood on the stacks is forgotten. */
void forget_fibers()
{
    for (fiber &f : fibers) {
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(f.stack, STACK);
#endif
        f.fake_stack = nullptr;
        f.groups.clear();
        f.open.clear();
        prepare(&f.where, f.stack, live);
    }
}

unsigned index_of(const fiber *f)
{
    return static_cast<unsigned>(f - fibers.data());
}

const char *deadlock()
{
    for (unsigned i = 0; i < running.n_threads; i++) {
        if (fibers[i].now == state::at_meeting) {
            return "lanes wait for others in their mask that never come";
        }
    }
    return "threads wait at a barrier that others never reach";
}

void start_block(unsigned n_threads)
{
    running.n_threads = n_threads;
    running.at_barrier = 0;
    running.shared.clear();
    running.shared_bytes = running.dynamic_bytes;
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(shared_memory, host::SHARED);
    __asan_unpoison_memory_region(shared_memory, running.dynamic_bytes);
#endif
    poison(shared_memory, running.dynamic_bytes);
    for (auto &warp : warps) {
        warp.clear();
    }
    for (unsigned i = 0; i < n_threads; i++) {
        fibers[i].now = state::ready;
        fibers[i].index = {i % blockDim.x, i / blockDim.x % blockDim.y,
                           i / blockDim.x / blockDim.y};
    }
}

/* The threads' turns, each warp's together in the place of its first. */
void by_warps(std::vector<unsigned> &turns)
{
    std::vector<size_t> place(warps.size(), turns.size());
    for (size_t i = turns.size(); i-- > 0;) {
        place[turns[i] / 32] = i;
    }
    std::stable_sort(turns.begin(), turns.end(), [&](unsigned a, unsigned b) {
        return place[a / 32] < place[b / 32];
    });
}

/* Run those of the threads that can; did one? */
bool advance(const unsigned *begin, const unsigned *end)
{
    bool moved = false;
    for (; begin < end && running.fault == nullptr; begin++) {
        if (fibers[*begin].now == state::ready) {
            moved = true;
            enter(&fibers[*begin]);
        }
    }
    return moved && running.fault == nullptr;
}

/* A warp runs as far as it can get without the others before one of them does:
 * what it takes from them too early, or leaves to them too late, is missing. */
bool run_block(std::vector<unsigned> &turns)
{
    unsigned n_threads = blockDim.x * blockDim.y * blockDim.z;
    start_block(n_threads);
    for (bool moved = true; moved;) {
        moved = false;
        host::arrange(turns, n_threads);
        by_warps(turns);
        const unsigned *at = turns.data(), *end = at + n_threads, *next;
        for (; at < end; at = next) {
            next = std::find_if(at, end, [&](unsigned i) {
                return i / 32 != *at / 32;
            });
            while (advance(at, next)) {
                moved = true;
            }
        }
        if (running.fault != nullptr) {
            return false;
        }
    }
    for (unsigned i = 0; i < n_threads; i++) {
        if (fibers[i].now != state::done) {
            running.fault = deadlock();
            return false;
        }
    }
    return true;
}

} // namespace

void rk_host_fault(const char *what)
{
    if (running.fault == nullptr) {
        running.fault = what;
    }
    leave();
    std::abort(); /* nobody comes back to this fiber */
}

bool host::run_kernel(dim3 grid, dim3 dims, size_t shared_bytes,
                      const std::function<void()> &body)
{
    std::vector<unsigned> blocks, turns;
    unsigned n_threads = dims.x * dims.y * dims.z;
    make_fibers(n_threads);
    warps.resize((fibers.size() + 31) / 32);
    gridDim = grid;
    blockDim = dims;
    running = {};
    running.body = &body;
    running.dynamic_bytes = shared_bytes;
    arrange(blocks, size_t(grid.x) * grid.y * grid.z);
    for (unsigned i : blocks) {
        blockIdx = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
        if (!run_block(turns)) {
            std::fprintf(stderr,
                         "cuda-host: %s (block %u, %u, %u; thread %u)\n",
                         running.fault, blockIdx.x, blockIdx.y, blockIdx.z,
                         index_of(current));
            forget_fibers();
            return false;
        }
    }
    return true;
}

/* ---- meeting ------------------------------------------------------------- */

int rk_host_lane()
{
    return static_cast<int>(index_of(current) % 32);
}

int rk_host_barrier(rk_host_vote vote, int value)
{
    if (running.at_barrier == 0) {
        running.vote = vote;
        running.count = running.any = 0;
        running.all = 1;
    } else if (running.vote != vote) {
        rk_host_fault("threads of a block wait at different barriers");
    }
    running.count += value != 0;
    running.any |= value != 0;
    running.all &= value != 0;
    current->now = state::at_barrier;
    if (++running.at_barrier == running.n_threads) {
        running.at_barrier = 0;
        running.result = vote == RK_HOST_COUNT ? running.count
                         : vote == RK_HOST_AND ? running.all
                                               : running.any;
        for (unsigned i = 0; i < running.n_threads; i++) {
            fibers[i].now = state::ready;
        }
    }
    /* Also the last to come lets others go first, in some order. */
    leave();
    return running.result;
}

void rk_host_meet(unsigned mask, rk_host_act *act, void *mine)
{
    unsigned me = index_of(current), lane = me % 32, warp = me / 32;
    unsigned n_lanes = running.n_threads - warp * 32;
    unsigned exist = n_lanes >= 32 ? 0xffffffffu : (1u << n_lanes) - 1;
    if (!(mask >> lane & 1)) {
        rk_host_fault("a lane calls with a mask that it is not in");
    }
    if (mask & ~exist) {
        rk_host_fault("a mask names lanes that the block does not have");
    }
    std::vector<meeting> &open = warps[warp];
    size_t at = 0;
    while (at < open.size() && !(open[at].mask & mask)) {
        at++;
    }
    if (at == open.size()) {
        open.push_back({mask, 0, act, {}});
    } else if (open[at].mask != mask || open[at].act != act) {
        rk_host_fault("lanes of a warp call different things");
    }
    open[at].arrived |= 1u << lane;
    open[at].lanes[lane] = mine;
    if (open[at].arrived != mask) {
        current->now = state::at_meeting;
        leave();
        return;
    }
    meeting met = open[at];
    open.erase(open.begin() + static_cast<ptrdiff_t>(at));
    act(met.lanes, mask);
    for (unsigned i = 0; i < 32; i++) {
        if (mask >> i & 1) {
            fibers[warp * 32 + i].now = state::ready;
        }
    }
}

/* ---- shared memory ------------------------------------------------------- */

void *rk_host_shared(const void *key, size_t bytes)
{
    auto found = running.shared.find(key);
    if (found != running.shared.end()) {
        return shared_memory + found->second;
    }
    size_t at = (running.shared_bytes + 15) / 16 * 16;
#if defined(__SANITIZE_ADDRESS__)
    at += 16; /* a gap that nobody may touch */
#endif
    running.shared_bytes = at + bytes;
    if (running.shared_bytes > host::SHARED ||
        running.shared_bytes - running.dynamic_bytes >
            SHARED_BEFORE_ATTRIBUTE) {
        rk_host_fault("a block has more shared memory than there is");
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(shared_memory + at, bytes);
#endif
    poison(shared_memory + at, bytes);
    running.shared[key] = at;
    return shared_memory + at;
}

unsigned char *rk_host_dynamic_shared()
{
    return shared_memory;
}

void rk_host_check_shared(const void *address, size_t bytes)
{
    auto p = static_cast<const unsigned char *>(address);
    if (p < shared_memory ||
        p + bytes > shared_memory + running.shared_bytes) {
        rk_host_fault("an address is not in the block's shared memory");
    }
}

/* ---- asynchronous copies ------------------------------------------------- */

void rk_copy16(void *shared, const void *global, bool valid)
{
    rk_host_align16(shared);
    rk_host_align16(global);
    rk_host_check_shared(shared, 16);
    if (valid ? !host::in_piece(global, 16) : !host::in_device(global)) {
        rk_host_fault("an asynchronous copy reads outside device memory");
    }
    poison(shared, 16);
    current->open.push_back(
        {static_cast<unsigned char *>(shared), global, valid});
}

void rk_copy_commit()
{
    current->groups.push_back(std::move(current->open));
    current->open.clear();
}

void rk_host_copy_wait(int n)
{
    auto &groups = current->groups;
    while (groups.size() > static_cast<size_t>(n)) {
        for (const copy &c : groups.front()) {
            if (c.valid) {
                std::memcpy(c.to, c.from, 16);
            } else {
                std::memset(c.to, 0, 16);
            }
        }
        groups.erase(groups.begin());
    }
}

/* ---- matrix fragments ---------------------------------------------------- */

namespace
{

struct rows {
    const void *row;
    uint32_t *out;
};

/* Element (i, j) of matrix m is half j of the row that lane 8 m + i names. */
template <bool transposed> void load_matrices(void *const lanes[32], unsigned)
{
    for (int lane = 0; lane < 32; lane++) {
        auto *me = static_cast<rows *>(lanes[lane]);
        for (int m = 0; m < 4; m++) {
            uint16_t halves[2];
            for (int e = 0; e < 2; e++) {
                int i = lane / 4, j = lane % 4 * 2 + e;
                const void *row =
                    static_cast<rows *>(lanes[8 * m + (transposed ? j : i)])
                        ->row;
                std::memcpy(&halves[e],
                            static_cast<const unsigned char *>(row) +
                                2 * (transposed ? i : j),
                            2);
            }
            me->out[m] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
        }
    }
}

struct fragments {
    float *d;
    const uint32_t *a, *b;
};

float half_of(uint32_t word, int which)
{
    __nv_bfloat16 x;
    x.bits = static_cast<uint16_t>(word >> 16 * which);
    return __bfloat162float(x);
}

void multiply(void *const lanes[32], unsigned)
{
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        auto *me = static_cast<fragments *>(lanes[lane]);
        int g = lane / 4, t = lane % 4 * 2;
        for (int e = 0; e < 2; e++) {
            a[g][t + e] = half_of(me->a[0], e);
            a[g + 8][t + e] = half_of(me->a[1], e);
            a[g][t + 8 + e] = half_of(me->a[2], e);
            a[g + 8][t + 8 + e] = half_of(me->a[3], e);
            b[t + e][g] = half_of(me->b[0], e);
            b[t + 8 + e][g] = half_of(me->b[1], e);
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        float *d = static_cast<fragments *>(lanes[lane])->d;
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, col = lane % 4 * 2 + i % 2;
            double sum = static_cast<double>(d[i]);
            for (int k = 0; k < 16; k++) {
                sum += static_cast<double>(a[row][k]) *
                       static_cast<double>(b[k][col]);
            }
            d[i] = static_cast<float>(sum);
        }
    }
}

constexpr unsigned WARP = 0xffffffffu;

void check_row(const void *row)
{
    rk_host_align16(row);
    rk_host_check_shared(row, 16);
}

} // namespace

void rk_ldmatrix(uint32_t out[4], const void *row)
{
    rows mine = {row, out};
    check_row(row);
    rk_host_meet(WARP, load_matrices<false>, &mine);
}

void rk_ldmatrix_trans(uint32_t out[4], const void *row)
{
    rows mine = {row, out};
    check_row(row);
    rk_host_meet(WARP, load_matrices<true>, &mine);
}

void rk_mma(float d[4], const uint32_t a[4], const uint32_t b[2])
{
    fragments mine = {d, a, b};
    rk_host_meet(WARP, multiply, &mine);
}
