// `disagg._native`: the one file that knows of Python. Every function lets go of the GIL while it works, but for work that is
// over sooner than it takes to get it back.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "copy.hpp"
#include "cuda_queue.hpp"
#include "digest.hpp"
#include "group_runs.hpp"
#include "orders.hpp"
#include "pack.hpp"
#include "process_copy.hpp"
#include "regions.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Int64Array = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;
using ReadOnlyColumn = nb::ndarray<nb::numpy, const std::uint64_t, nb::ndim<1>>;
using Runs = std::tuple<Int64Array, Int64Array, Int64Array>;

template <typename T>
std::span<const T> view(const Column<T>& column) {
    return {column.data(), column.shape(0)};
}

// ----------------------------------------------------------------------------------------------- who wants the interpreter

// Lets go of the interpreter while one lives. Where the interpreter is ending, Python 3.13 and older end a thread that wants it
// again by an exception that must not leave a destructor: it stays here then, as it does in newer ones.
struct WithoutInterpreter {
    PyThreadState* const state = PyEval_SaveThread();

    WithoutInterpreter() = default;
    WithoutInterpreter(const WithoutInterpreter&) = delete;
    WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;
    ~WithoutInterpreter() {
        try {
            PyEval_RestoreThread(state);
        } catch (...) {
            for (;;) pause();
        }
    }
};

// Threads of this library that have work: those that were enlisted, and do not wait now by one of the functions here. Others,
// which may have nothing better to do than to ask whether that work is done, let them have the interpreter (`yield_gil`), which
// they would keep for milliseconds otherwise.
std::atomic<int> num_busy = 0;

struct Busy {
    bool enlisted = false;
    bool counted = false;

    ~Busy() { count(false); }
    bool count(bool is_busy) {
        if (is_busy != counted) num_busy += is_busy ? 1 : -1;
        return std::exchange(counted, is_busy);
    }
};
thread_local Busy busy;

// While one lives its thread does without the interpreter, waiting for work; from then on it has some.
struct Idle {
    Idle() { busy.count(false); }
    ~Idle() { busy.count(busy.enlisted); }
    Idle(const Idle&) = delete;
    Idle& operator=(const Idle&) = delete;
    const WithoutInterpreter released;
};

// While one lives its thread does without the interpreter, at work that does not need it.
struct Apart {
    Apart() : was_busy{busy.count(false)} {}
    ~Apart() { busy.count(was_busy); }
    Apart(const Apart&) = delete;
    Apart& operator=(const Apart&) = delete;
    const WithoutInterpreter released;
    bool was_busy;
};

// Lets go of the GIL while a function works, if it has more than a few microseconds of work: a thread that computes in
// Python keeps it for milliseconds once it has it.
class Released {
  public:
    explicit Released(std::size_t num_items) {
        if (num_items >= kWorth) apart_.emplace();
    }

  private:
    static constexpr std::size_t kWorth = 4096;
    std::optional<Apart> apart_;
};

// ---------------------------------------------------------------------------------------------------------- index runs

struct Free {
    void operator()(std::int64_t* memory) const noexcept { std::free(memory); }
};
using Buffer = std::unique_ptr<std::int64_t, Free>;

Buffer allocate(std::size_t count) {
    Buffer memory{static_cast<std::int64_t*>(std::malloc((count ? count : 1) * sizeof(std::int64_t)))};
    if (!memory) throw std::bad_alloc();
    return memory;
}

template <typename S, typename D>
Runs group_runs(const Column<S>& source, const Column<D>& destination) {
    using Groups = disagg::RunGroups<S, D>;
    Buffer memory;
    std::size_t count = 0;
    {
        const Apart apart;
        const std::unique_ptr<std::uint64_t[]> words(new std::uint64_t[Groups::num_words(source.shape(0)) + 1]);
        const Groups groups(view(source), view(destination), words.get());
        count = groups.num_runs();
        memory = allocate(3 * count);
        std::int64_t* const p = memory.get();
        groups.write({p, p + count, p + 2 * count});
    }
    std::int64_t* const p = memory.get();
    const nb::capsule owner(p, [](void* pointer) noexcept { std::free(pointer); });
    memory.release();
    return {Int64Array(p, {count}, owner), Int64Array(p + count, {count}, owner), Int64Array(p + 2 * count, {count}, owner)};
}

// ------------------------------------------------------------------------------------------------------------- binding

using RunTable = nb::ndarray<const std::int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
using NewRunTable = nb::ndarray<nb::numpy, std::int64_t, nb::shape<-1, 5>>;
using Fault = std::tuple<int, bool, std::int64_t, std::int64_t>;
static_assert(sizeof(disagg::TokenRun) == 5 * sizeof(std::int64_t));

std::span<const disagg::TokenRun> view(const RunTable& runs) {
    return {reinterpret_cast<const disagg::TokenRun*>(runs.data()), runs.shape(0)};
}

// One side's pages, which keeps what it was made of.
struct Pages {
    Column<std::int32_t> ids;
    Column<std::int64_t> edges;
    disagg::PageList list;

    Pages(Column<std::int32_t> ids_, std::int64_t first_page, std::int64_t page_size, std::int64_t num_rows,
          Column<std::int64_t> edges_, std::int64_t period)
        : ids(std::move(ids_)), edges(std::move(edges_)) {
        list = {view(ids), first_page, page_size, num_rows, {view(edges), period}};
    }
};

std::tuple<NewRunTable, std::optional<Fault>> token_runs(std::int64_t start, std::int64_t stop, std::int64_t granule,
                                                         const Pages& source, const Pages& destination) {
    auto found = std::make_unique<disagg::TokenRuns>();
    {
        const Released released(static_cast<std::size_t>(stop - start));
        *found = disagg::token_runs(start, stop, granule, source.list, destination.list);
    }
    std::optional<Fault> fault;
    if (found->fault) fault = Fault{found->fault->side, found->fault->listed, found->fault->token, found->fault->row};
    const std::size_t count = found->runs.size();
    auto* const data = reinterpret_cast<std::int64_t*>(found->runs.data());
    const nb::capsule owner(found.get(), [](void* p) noexcept { delete static_cast<disagg::TokenRuns*>(p); });
    found.release();
    return {NewRunTable(data, {count, 5}, owner), fault};
}

disagg::Dim dim(std::uint64_t count, std::uint64_t source, std::uint64_t destination) { return {count, source, destination}; }

using Strides = std::tuple<std::uint64_t, std::uint64_t>;
using Steps = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;

void make_span(disagg::Span* self, const Column<std::int64_t>& layers, const Column<std::uint64_t>& source_bases,
               const Column<std::uint64_t>& destination_bases, const Strides& row_strides, const Strides& token_strides,
               const std::vector<Steps>& dims, std::uint64_t nbytes, bool dense) {
    if (source_bases.shape(0) != layers.shape(0) || destination_bases.shape(0) != layers.shape(0)) {
        throw std::invalid_argument("span: expected a source base and a destination base for each layer");
    }
    const auto copied = [](const auto& column) { return std::vector(column.data(), column.data() + column.shape(0)); };
    disagg::Span span{copied(layers), copied(source_bases), copied(destination_bases), {}, {}, {}, nbytes, dense};
    span.row = dim(1, std::get<0>(row_strides), std::get<1>(row_strides));
    span.token = dim(1, std::get<0>(token_strides), std::get<1>(token_strides));
    for (const auto& [count, source, destination] : dims) span.dims.push_back(dim(count, source, destination));
    new (self) disagg::Span(std::move(span));
}

// `disagg::Columns` for one user at a time.
struct Columns {
    disagg::Columns columns;
    std::atomic_flag busy;
};

class Use {
  public:
    explicit Use(Columns& columns) : columns_(columns) {
        if (columns.busy.test_and_set()) throw std::invalid_argument("columns: another thread is filling them");
    }
    ~Use() { columns_.busy.clear(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

  private:
    Columns& columns_;
};

// Spans with their runs, held for as long as they are worked on, whatever becomes of the lists meanwhile.
struct Shapes {
    std::vector<const disagg::Span*> spans;
    std::vector<std::span<const disagg::TokenRun>> runs;
    std::optional<std::span<const std::int64_t>> layers;
    std::vector<nb::object> held;

    // Runs times bases: at least as many pieces.
    std::size_t num_items() const {
        std::size_t total = 0;
        for (std::size_t i = 0; i < std::min(spans.size(), runs.size()); ++i) {
            total += runs[i].size() * spans[i]->source_bases.size();
        }
        return total;
    }

    Shapes(const nb::list& spans_, const std::vector<RunTable>& runs_, const std::optional<Column<std::int64_t>>& layers_) {
        for (const nb::handle span : spans_) {
            if (!nb::isinstance<disagg::Span>(span)) throw nb::type_error("spans: expected only Span");
            held.push_back(nb::borrow(span));
            spans.push_back(nb::inst_ptr<disagg::Span>(span));
        }
        for (const RunTable& table : runs_) {
            if (!table.is_valid()) throw nb::type_error("runs: expected only int64 tables");  // None, inside a list
            runs.push_back(view(table));
        }
        if (layers_) layers = view(*layers_);
    }
};

using ReadOnlyColumns = std::tuple<ReadOnlyColumn, ReadOnlyColumn, ReadOnlyColumn>;

// Source, destination and length; they hold the columns' memory.
ReadOnlyColumns views(const disagg::Columns& columns) {
    using Memory = std::shared_ptr<std::uint64_t[]>;
    auto memory = std::make_unique<Memory>(columns.memory());
    const nb::capsule owner(memory.get(), [](void* p) noexcept { delete static_cast<Memory*>(p); });
    memory.release();
    const auto column = [&](const std::uint64_t* data) { return ReadOnlyColumn(data, {columns.size()}, owner); };
    return {column(columns.source()), column(columns.destination()), column(columns.nbytes())};
}

std::uint64_t num_copies(const nb::list& spans, const std::vector<RunTable>& runs,
                         const std::optional<Column<std::int64_t>>& layers) {
    const Shapes shapes(spans, runs, layers);
    const Released released(shapes.num_items());
    return disagg::num_copies(shapes.spans, shapes.runs, shapes.layers);
}

ReadOnlyColumns expand(const nb::list& spans, const std::vector<RunTable>& runs,
                       const std::optional<Column<std::int64_t>>& layers, std::int64_t num_threads, Columns& out) {
    const Shapes shapes(spans, runs, layers);
    const Use use(out);
    {
        const Released released(shapes.num_items());
        disagg::expand(shapes.spans, shapes.runs, shapes.layers, num_threads, out.columns);
    }
    return views(out.columns);
}

// ------------------------------------------------------------------------------------------------- copies, packs, digests

using Addresses = Column<std::uint64_t>;

std::uint64_t copy_batch(const Addresses& source, const Addresses& destination, const Addresses& nbytes,
                         std::int64_t num_threads) {
    const Apart apart;
    return disagg::copy_batch({view(source), view(destination), view(nbytes)}, num_threads);
}

std::uint64_t total_nbytes(const Addresses& nbytes) {
    const Released released(nbytes.shape(0));
    return std::accumulate(nbytes.data(), nbytes.data() + nbytes.shape(0), std::uint64_t{0});
}

void append(disagg::Stream& self, const nb::list& spans, const std::vector<RunTable>& runs,
            const std::optional<Column<std::int64_t>>& layers) {
    const Shapes shapes(spans, runs, layers);
    const Released released(shapes.num_items());
    self.append(shapes.spans, shapes.runs, shapes.layers);
}

ReadOnlyColumns stream_copies(const disagg::Stream& self, std::uint64_t offset, std::uint64_t nbytes, std::uint64_t staging) {
    disagg::Columns columns;
    {
        const Apart apart;
        self.copies(offset, nbytes, staging, columns);
    }
    return views(columns);
}

// Regions of memory, which keep what they were made of.
struct Regions {
    Addresses starts;
    Addresses stops;
    Addresses devices;

    disagg::RegionColumns columns() const { return {view(starts), view(stops), view(devices)}; }
};

using Places = nb::ndarray<std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Descriptors = nb::ndarray<std::uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
static_assert(sizeof(disagg::Descriptor) == 3 * sizeof(std::uint64_t));

std::size_t locate(const Regions& self, const Addresses& addresses, const Addresses& nbytes, const Places& out) {
    const Released released(addresses.shape(0));
    return disagg::locate(self.columns(), {view(addresses), view(nbytes)}, {out.data(), out.shape(0)});
}

std::size_t describe(const Regions& self, const Addresses& addresses, const Addresses& nbytes, const Descriptors& out) {
    const Released released(addresses.shape(0));
    auto* const rows = reinterpret_cast<disagg::Descriptor*>(out.data());
    return disagg::describe(self.columns(), {view(addresses), view(nbytes)}, {rows, out.shape(0)});
}

std::size_t count_held(const Regions& self, const Addresses& addresses, const Addresses& nbytes) {
    const Released released(addresses.shape(0));
    return disagg::count_held(self.columns(), {view(addresses), view(nbytes)});
}

using Indices = nb::ndarray<std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::int32_t place_blocks(const Regions& self, const Addresses& addresses, const Addresses& nbytes, std::uint64_t block,
                          std::uint64_t per_list, const Addresses& firsts, const Indices& lists, const Indices& indices) {
    const Released released(addresses.shape(0));
    return disagg::place_blocks(self.columns(), {view(addresses), view(nbytes)}, {block, per_list, view(firsts)},
                                {{lists.data(), lists.shape(0)}, {indices.data(), indices.shape(0)}});
}

int copy_between_processes(int pid, const Addresses& local, const Addresses& remote, const Addresses& nbytes, bool write,
                           std::int64_t num_threads) {
    const disagg::ProcessCopies pieces{view(local), view(remote), view(nbytes)};
    const Apart apart;
    return disagg::copy_between_processes(pid, pieces, write, num_threads);
}

using Sums = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint64_t digest(const Column<std::int64_t>& layers, const Addresses& bases, const RunTable& runs,
                     const std::vector<Steps>& axes, std::uint64_t row_stride, std::uint64_t token_stride,
                     std::uint64_t itemsize, std::uint64_t seed, std::int64_t num_threads, const std::optional<Sums>& by_layer,
                     const std::optional<Sums>& by_row) {
    std::vector<disagg::DigestAxis> inner;
    for (const auto& [count, stride, start] : axes) inner.push_back({count, stride, start});
    disagg::DigestParts parts;
    if (by_layer) parts.by_layer = {by_layer->data(), by_layer->size()};
    if (by_row) parts.by_row = {by_row->data(), by_row->size()};
    const Apart apart;
    return disagg::digest({view(layers), view(bases), row_stride, token_stride, inner, itemsize, seed}, view(runs), num_threads,
                          parts);
}

// Span classes, as far as sizes go.
struct SpanSizes {
    std::vector<disagg::SpanSize> sizes;

    SpanSizes(const Addresses& steps, const Addresses& nbytes, const Addresses& num_bases, const Column<bool>& dense) {
        if (nbytes.shape(0) != steps.shape(0) || num_bases.shape(0) != steps.shape(0) || dense.shape(0) != steps.shape(0)) {
            throw std::invalid_argument("span classes: expected columns of one length");
        }
        for (std::size_t i = 0; i < steps.shape(0); ++i) {
            sizes.push_back({steps.data()[i], nbytes.data()[i], num_bases.data()[i], dense.data()[i]});
        }
    }
};

// A `disagg::Order`, which keeps what it was made of.
struct Order {
    using Part = std::tuple<std::size_t, std::optional<Column<std::int64_t>>, RunTable>;
    std::vector<Part> held;
    disagg::Order order;

    Order(const SpanSizes& sizes, std::vector<Part> parts) : held(std::move(parts)), order(sizes.sizes, views()) {}

    std::vector<disagg::OrderPart> views() const {
        std::vector<disagg::OrderPart> found;
        for (const auto& [span, bases, runs] : held) {
            if (!runs.is_valid()) throw nb::type_error("runs: expected int64 tables");  // None, inside a tuple
            found.push_back({span, std::nullopt, view(runs)});
            if (bases) found.back().bases = view(*bases);
        }
        return found;
    }
};

using Words = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Asks again and again for so long, without sleeping, and without the GIL; whether `is_over` said so.
template <typename IsOver>
bool ask_for(double seconds, const IsOver& is_over) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    bool found = is_over();
    while (!found && std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
        found = is_over();
    }
    return found;
}

// A `disagg::CudaQueue` whose calls let go of the interpreter, or keep it: they are short, and a thread that lets go of it may
// have to wait for it for milliseconds, while others of this library may wait for it meanwhile.
struct CudaQueue : disagg::CudaQueue {
    bool holds_gil;

    CudaQueue(const std::string& library, std::uintptr_t context, std::uintptr_t stream, std::uintptr_t uploads, bool keeps)
        : disagg::CudaQueue{library, context, stream, uploads}, holds_gil{keeps} {}

    std::unique_ptr<Apart> apart() const { return holds_gil ? nullptr : std::make_unique<Apart>(); }
};

// An event of a queue, which it keeps.
struct CudaEvent {
    nb::object held;
    const CudaQueue* queue;
    std::uintptr_t event;
};

// Set once, by any thread, and waited for by others.
struct Flag {
    std::atomic<bool> is_set = false;
    std::atomic<int> num_lingering = 0;

    // Has those that linger for it, once it is set, go on first: who finds the interpreter taken when it wants to go on sleeps,
    // and waking takes longer than all else. They have so long to take it.
    void yield_to_waiter() {
        constexpr auto patience = std::chrono::microseconds(20);
        if (num_lingering.load() == 0) return;
        const WithoutInterpreter released;
        const auto until = std::chrono::steady_clock::now() + patience;
        while (num_lingering.load() > 0 && std::chrono::steady_clock::now() < until) {
        }
    }

    // With the interpreter again on return, and only then no longer counted.
    bool linger(double seconds) {
        ++num_lingering;
        bool found = false;
        {
            const WithoutInterpreter released;
            found = ask_for(seconds, [&] { return is_set.load(); });
        }
        --num_lingering;
        return found;
    }
};

// A word of memory that another process may share, and the value that it is to have; the array is kept.
template <typename Array>
struct WordOf {
    Array board;
    std::size_t index;
    std::uint64_t value;

    WordOf(Array words, std::size_t at, std::uint64_t awaited) : board{std::move(words)}, index{at}, value{awaited} {
        if (index >= board.shape(0)) throw std::out_of_range("word: there are not so many");
    }

    // The compiled core is the only one that uses such memory, and by atomic operations.
    std::atomic_ref<std::uint64_t> word() const { return std::atomic_ref{const_cast<std::uint64_t&>(board.data()[index])}; }
};

// A word that is looked at; its memory may be read-only.
struct Word : WordOf<Column<std::uint64_t>> {
    using WordOf::WordOf;
    bool is_set() const { return word().load(std::memory_order_acquire) == value; }
};

// A sign, and the word that is to have its value once that shows; a sign of what has failed sets none.
struct Notice : WordOf<Words> {
    nb::object held;
    const Flag* flag;
    const CudaEvent* event;

    Notice(nb::object sign, Words words, std::size_t at, std::uint64_t told)
        : WordOf{std::move(words), at, told}, held{std::move(sign)}, flag{nullptr}, event{nullptr} {
        if (nb::isinstance<Flag>(held)) {
            flag = nb::inst_ptr<Flag>(held);
        } else {
            event = nb::cast<const CudaEvent*>(held);
        }
    }

    void tell() const { word().store(value, std::memory_order_release); }

    // Whether the sign shows, or never will; where it shows that is told.
    bool is_over() const {
        const int status = event                 ? event->queue->query(event->event).status
                           : flag->is_set.load() ? 0
                                                 : disagg::CudaQueue::kNotReady;
        if (status == 0) tell();
        return status != disagg::CudaQueue::kNotReady;
    }
};

bool is_readable(int descriptor) {
    pollfd watched{descriptor, POLLIN, 0};
    return poll(&watched, 1, 0) > 0;
}

void send_packet(int socket, const nb::bytes& packet) {
    if (send(socket, packet.c_str(), packet.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

using Watched = std::optional<Column<std::int32_t>>;

std::vector<pollfd> watch(const Watched& descriptors) {
    std::vector<pollfd> watched;
    if (!descriptors) return watched;
    for (const std::int32_t descriptor : view(*descriptors)) watched.push_back({descriptor, POLLIN, 0});
    return watched;
}

// Until a descriptor is readable or a sign shows, without sleeping.
bool look(double seconds, const Watched& descriptors, const nb::list& signs) {
    std::vector<pollfd> watched = watch(descriptors);
    std::vector<nb::object> held;  // whatever becomes of the list meanwhile
    std::vector<const Notice*> notices;
    std::vector<const Word*> words;
    std::vector<const Flag*> flags;
    std::vector<CudaEvent> events;
    for (const nb::handle sign : signs) {
        held.push_back(nb::borrow(sign));
        if (nb::isinstance<Notice>(sign)) {
            notices.push_back(nb::inst_ptr<Notice>(sign));
        } else if (nb::isinstance<Word>(sign)) {
            words.push_back(nb::inst_ptr<Word>(sign));
        } else if (nb::isinstance<Flag>(sign)) {
            flags.push_back(nb::inst_ptr<Flag>(sign));
        } else {
            events.push_back(nb::cast<CudaEvent>(sign));
        }
    }
    const Idle idle;
    return ask_for(seconds, [&] {
        // Every notice is asked, whatever else there is: others wait for it.
        return std::count_if(notices.begin(), notices.end(), [](const Notice* notice) { return notice->is_over(); }) > 0 ||
               std::any_of(words.begin(), words.end(), [](const Word* word) { return word->is_set(); }) ||
               std::any_of(flags.begin(), flags.end(), [](const Flag* flag) { return flag->is_set.load(); }) ||
               std::any_of(events.begin(), events.end(), [](const CudaEvent& e) { return e.queue->is_over(e.event); }) ||
               poll(watched.data(), watched.size(), 0) > 0;
    });
}

// How long a thread sleeps at most, in seconds: what time brings is looked up after that.
constexpr double kLongest = 3600.0;

timespec duration(double seconds) {
    const double bounded = std::clamp(seconds, 0.0, kLongest);
    const auto whole = static_cast<std::time_t>(bounded);
    return {whole, static_cast<long>((bounded - static_cast<double>(whole)) * 1e9)};
}

// Until a descriptor is readable, sleeping.
void sleep_for(double seconds, const Watched& descriptors) {
    std::vector<pollfd> watched = watch(descriptors);
    const timespec longest = duration(seconds);
    const Idle idle;
    ppoll(watched.data(), watched.size(), &longest, nullptr);
}

// What a thread sleeps for until another one has it wake up.
class Alarm {
  public:
    void set() {
        const std::lock_guard<std::mutex> locked(mutex_);
        is_set_ = true;
        rung_.notify_one();
    }

    bool wait(double seconds) {
        const Idle idle;
        std::unique_lock<std::mutex> locked(mutex_);
        rung_.wait_for(locked, std::chrono::duration<double>(std::clamp(seconds, 0.0, kLongest)), [&] { return is_set_; });
        return std::exchange(is_set_, false);
    }

  private:
    std::mutex mutex_;
    std::condition_variable rung_;
    bool is_set_ = false;
};

// Lets threads of this library that have work have the interpreter, for so long, and then for twice as long not again.
void yield_gil() {
    constexpr auto patience = std::chrono::microseconds(100);
    static std::atomic<std::chrono::steady_clock::time_point> again{std::chrono::steady_clock::time_point{}};
    if (num_busy.load() == 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (now < again.load()) return;
    const WithoutInterpreter released;
    while (num_busy.load() > 0 && std::chrono::steady_clock::now() < now + patience) std::this_thread::yield();
    again.store(now + 3 * patience);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Compiled core of disagg: functions on integer columns. Arguments are checked for type, not for meaning.";
    pthread_atfork(nullptr, nullptr, [] { num_busy = busy.counted ? 1 : 0; });  // the other threads are not there

    const char* const group_doc =
        "Maximal runs in which both lists step by one: (source starts, destination starts, lengths), int64.\n\n"
        "A pair with a negative id is in no run; empty on either side gives no runs.\n"
        "Takes contiguous 1-D int64 or int32 arrays, without copying. ValueError: lengths differ.";
    m.def("group_concurrent_contiguous", &group_runs<std::int64_t, std::int64_t>, "source"_a.noconvert(),
          "destination"_a.noconvert(), group_doc);
    m.def("group_concurrent_contiguous", &group_runs<std::int32_t, std::int32_t>, "source"_a.noconvert(),
          "destination"_a.noconvert());
    m.def("group_concurrent_contiguous", &group_runs<std::int64_t, std::int32_t>, "source"_a.noconvert(),
          "destination"_a.noconvert());
    m.def("group_concurrent_contiguous", &group_runs<std::int32_t, std::int64_t>, "source"_a.noconvert(),
          "destination"_a.noconvert());

    nb::class_<Pages>(m, "PageList", "One side's pages of a request, and the tokens it owns.")
        .def(nb::init<Column<std::int32_t>, std::int64_t, std::int64_t, std::int64_t, Column<std::int64_t>, std::int64_t>(),
             "ids"_a.noconvert(), nb::kw_only(), "first_page"_a, "page_size"_a, "num_rows"_a, "edges"_a.noconvert(),
             "period"_a);
    m.def("token_runs", &token_runs, "start"_a, "stop"_a, "granule"_a, "source"_a, "destination"_a,
          "Positions that both sides own, as runs inside one page on each side: an int64 table\n"
          "(source row, source offset, destination row, destination offset, length), and None or the first\n"
          "fault (side, listed, token, row), with which there are no runs. ValueError: no range, page size or ownership.");

    nb::class_<disagg::Span>(m, "Span", "Copies of one shape; immutable.")
        .def("__init__", &make_span, "layers"_a.noconvert(), "source_bases"_a.noconvert(), "destination_bases"_a.noconvert(),
             nb::kw_only(), "row_strides"_a, "token_strides"_a, "dims"_a, "nbytes"_a, "dense"_a);
    nb::class_<Columns>(m, "Columns", "Memory of three uint64 columns that grows and is used again; one user at a time.")
        .def(nb::init<>())
        .def_prop_ro("capacity", [](const Columns& self) { return self.columns.capacity(); });
    m.def("expand", &expand, "spans"_a, "runs"_a.noconvert(), "layers"_a.noconvert().none(), "num_threads"_a, "out"_a,
          "Addresses of bases x runs x dims, neighbours joined: read-only views (source, destination, nbytes) of `out`.\n\n"
          "They hold their memory, but the next use of `out` may change it. ValueError: columns of different lengths,\n"
          "empty runs, more than 2**31 copies, or `out` in use by another thread.");

    m.def("num_copies", &num_copies, "spans"_a, "runs"_a.noconvert(), "layers"_a.noconvert().none(),
          "How many copies expand would give, but for neighbours in different layers or spans. ValueError as for expand.");

    nb::class_<Regions>(m, "Regions", "Regions of memory [starts[k], stops[k]), on devices of these numbers; starts ascend.")
        .def(nb::init<Addresses, Addresses, Addresses>(), "starts"_a.noconvert(), "stops"_a.noconvert(),
             "devices"_a.noconvert())
        .def("locate", &locate, "addresses"_a.noconvert(), "nbytes"_a.noconvert(), "out"_a.noconvert(),
             "Which region holds each range of memory whole goes to `out`, int64; returns how many come before the first\n"
             "that none holds, from which on nothing is written. ValueError: columns of different lengths.")
        .def("describe", &describe, "addresses"_a.noconvert(), "nbytes"_a.noconvert(), "out"_a.noconvert(),
             "As locate; `out` are uint64 rows (address, length, device number).")
        .def("count_held", &count_held, "addresses"_a.noconvert(), "nbytes"_a.noconvert(),
             "How many ranges come before the first that no region holds whole. ValueError as for locate.")
        .def(
            "place_blocks", &place_blocks, "addresses"_a.noconvert(), "nbytes"_a.noconvert(), "block"_a, "per_list"_a,
            "firsts"_a.noconvert(), "lists"_a.noconvert(), "indices"_a.noconvert(),
            "Whether each range is one of the blocks of `block` bytes that regions are cut into from their starts on, counted\n"
            "from firsts[k] in region k: if so, number // per_list goes to `lists`, the rest to `indices`, both int32, and\n"
            "the highest of `lists` comes back, else -1. ValueError as for locate, and for a block or lists of nothing.");
    m.def("copy_batch", &copy_batch, "source"_a.noconvert(), "destination"_a.noconvert(), "nbytes"_a.noconvert(),
          "num_threads"_a = 1,
          "Copy nbytes[i] bytes from address source[i] to address destination[i]; three contiguous uint64 columns.\n\n"
          "Returns the bytes copied. Memory must be mapped and destinations disjoint: nothing checks that here.\n"
          "ValueError: columns of different lengths, or num_threads below 1.");
    m.def("total_nbytes", &total_nbytes, "nbytes"_a.noconvert(), "The sum of a contiguous uint64 column, modulo 2**64.");
    m.def("copy_between_processes", &copy_between_processes, "pid"_a, "local"_a.noconvert(), "remote"_a.noconvert(),
          "nbytes"_a.noconvert(), nb::kw_only(), "write"_a, "num_threads"_a = 1,
          "Copy between addresses of this process and of process `pid`, to it or from it; three columns of one length.\n\n"
          "Returns 0, or the system's error number, any part having been copied; nothing is under way any more. Local memory\n"
          "must be mapped: nothing checks that here. ValueError: columns of different lengths, or num_threads below 1.");
    nb::class_<disagg::Stream>(m, "Stream",
                               "One side's bytes of a request in an order that both sides know: spans, layers, runs, dims.\n\n"
                               "Holds one layer's pieces of each shape. Memory must be mapped: nothing checks that here.")
        .def(
            "__init__",
            [](disagg::Stream* self, bool source) {
                new (self) disagg::Stream(source ? disagg::Side::kSource : disagg::Side::kDestination);
            },
            nb::kw_only(), "source"_a)
        .def_prop_ro("total", &disagg::Stream::total)
        .def_prop_ro("num_pieces", &disagg::Stream::num_pieces)
        .def("append", &append, "spans"_a, "runs"_a.noconvert(), "layers"_a.noconvert().none(),
             "Add spans over their runs. By one thread, before the stream is used. ValueError as for expand.")
        .def("gather", &disagg::Stream::gather, nb::call_guard<Apart>(), "offset"_a, "nbytes"_a, "staging_address"_a,
             "num_threads"_a = 1,
             "Copy bytes [offset, offset + nbytes) of the stream to the staging. IndexError where it does not have them.")
        .def("scatter", &disagg::Stream::scatter, nb::call_guard<Apart>(), "offset"_a, "nbytes"_a, "staging_address"_a,
             "num_threads"_a = 1,
             "Copy the staging to bytes [offset, offset + nbytes) of the stream. IndexError where it does not have them.")
        .def("copies", &stream_copies, "offset"_a, "nbytes"_a, "staging_address"_a,
             "The copies that gather or scatter would make: (source, destination, nbytes). IndexError as there.");
    m.def("digest", &digest, "layers"_a.noconvert(), "bases"_a.noconvert(), "runs"_a.noconvert(), "axes"_a, nb::kw_only(),
          "row_stride"_a, "token_stride"_a, "itemsize"_a, "seed"_a, "num_threads"_a = 1, "by_layer"_a.noconvert() = nb::none(),
          "by_row"_a.noconvert() = nb::none(),
          "Sum modulo 2**64 of every element times an odd weight for each of its global coordinates; its parts by layer\n"
          "and by destination row are added to the arrays given.\n"
          "ValueError: columns of different lengths, empty runs, another item size than 1, 2, 4 or 8.");
    nb::class_<SpanSizes>(m, "SpanSizes", "How much one position of each span class moves, by columns.")
        .def(nb::init<Addresses, Addresses, Addresses, Column<bool>>(), "steps"_a.noconvert(), "nbytes"_a.noconvert(),
             "num_bases"_a.noconvert(), "dense"_a.noconvert());
    nb::class_<Order>(
        m, "WorkList",
        "A request over span classes, of parts (span class, numbers of its bases or None for all, token runs).\n\n"
        "ValueError: no such span class, a run without a position, or 2**64 bytes.")
        .def(nb::init<const SpanSizes&, std::vector<Order::Part>>(), "sizes"_a, "parts"_a.noconvert())
        .def_prop_ro("num_pieces", [](const Order& self) { return self.order.num_pieces(); })
        .def_prop_ro("total_nbytes", [](const Order& self) { return self.order.total_nbytes(); })
        .def_prop_ro("num_words", [](const Order& self) { return self.order.num_words(); })
        .def(
            "encode",
            [](Order& self, const Column<std::int64_t>& at, std::uint64_t tile, const Words& out) {
                return self.order.encode(view(at), tile, {out.data(), out.shape(0)});
            },
            "at"_a.noconvert(), "tile"_a, "out"_a.noconvert(),
            "Write it as the kernel reads it, up to num_words words, in tiles of so many bytes; `at` are the words at which\n"
            "span classes begin. The bytes written. ValueError: `out` or `at` too short, or too many pieces or tiles.")
        .def(
            "tiles", [](const Order& self, std::uint64_t low, std::uint64_t high) { return self.order.tiles(low, high); },
            "low"_a, "high"_a,
            "The tiles [first, end) that hold bytes [low, high) of the stream, once encoded. ValueError where there are none.");
    using Status = std::tuple<const char*, int>;
    nb::class_<CudaQueue>(m, "CudaQueue", "Work for one stream of a CUDA context, by the driver that is loaded by name.")
        .def(nb::init<const std::string&, std::uintptr_t, std::uintptr_t, std::uintptr_t, bool>(), "library"_a, "context"_a,
             "stream"_a, "uploads"_a, nb::kw_only(), "holds_gil"_a = false)
        .def(
            "upload",
            [](const CudaQueue& queue, std::uint64_t device, std::uintptr_t host, std::size_t nbytes,
               std::uintptr_t uploaded) -> Status {
                const auto apart = queue.apart();
                const auto [call, status] = queue.upload(device, host, nbytes, uploaded);
                return {call, status};
            },
            "device"_a, "host"_a, "nbytes"_a, "uploaded"_a, "Copy to the GPU, before what is launched next.")
        .def(
            "launch",
            [](const CudaQueue& queue, std::uintptr_t kernel, const std::vector<std::uint64_t>& arguments, unsigned blocks,
               unsigned threads, unsigned shared, std::uintptr_t done) -> Status {
                const auto apart = queue.apart();
                const auto [call, status] = queue.launch(kernel, arguments, blocks, threads, shared, done);
                return {call, status};
            },
            "kernel"_a, "arguments"_a, "blocks"_a, "threads"_a, "shared"_a, "done"_a,
            "Start a kernel, and record an event behind it.")
        .def(
            "query",
            [](const CudaQueue& queue, std::uintptr_t event) -> Status {
                const auto apart = queue.apart();
                const auto [call, status] = queue.query(event);
                return {call, status};
            },
            "event"_a, "The status of an event.");
    m.def("is_readable", &is_readable, "descriptor"_a, "Whether a descriptor is readable or over; keeps the interpreter.");
    m.def("send", &send_packet, "socket"_a, "packet"_a,
          "Send a packet at once, keeping the interpreter. OSError where that cannot be, BlockingIOError for want of room.");
    nb::class_<Flag>(m, "Flag", "Set once, by any thread.")
        .def(nb::init<>())
        .def("set", [](Flag& self) { self.is_set.store(true); })
        .def("yield_to_waiter", &Flag::yield_to_waiter, "Let whoever lingers for it have the interpreter first, once it is set.")
        .def("busy_poll", &Flag::linger, "seconds"_a,
             "Wait for it for so long, without sleeping; other threads have the interpreter meanwhile. Whether it is.");
    nb::class_<CudaEvent>(m, "CudaEvent", "An event that is recorded on a queue's stream.")
        .def(
            "__init__",
            [](CudaEvent* self, nb::object queue, std::uintptr_t event) {
                const auto* const own = nb::cast<const CudaQueue*>(queue);
                new (self) CudaEvent{std::move(queue), own, event};
            },
            "queue"_a, "event"_a);
    nb::class_<Word>(m, "CompletionWord", "A word of memory that another process writes, and the value that it is to have.")
        .def(nb::init<Column<std::uint64_t>, std::size_t, std::uint64_t>(), "board"_a.noconvert(), "index"_a, "value"_a)
        .def("is_set", &Word::is_set, "Whether it has that value.");
    nb::class_<Notice>(m, "CompletionSignal", "A sign, and the word of memory that is given a value once it shows.")
        .def(nb::init<nb::object, Words, std::size_t, std::uint64_t>(), "sign"_a, "board"_a.noconvert(), "index"_a, "value"_a)
        .def("signal", &Notice::tell, "Give the word its value now.");
    m.def("busy_poll", &look, "seconds"_a, "descriptors"_a.noconvert() = nb::none(), "signs"_a = nb::list(),
          "Wait without sleeping until a descriptor is readable or a sign shows; whether one does.");
    m.def("sleep", &sleep_for, "seconds"_a, "descriptors"_a.noconvert() = nb::none(), "Wait until a descriptor is readable.");
    nb::class_<Alarm>(m, "Alarm", "What a thread sleeps for until another one has it wake up.")
        .def(nb::init<>())
        .def("set", &Alarm::set, "Have the one that waits, or waits next, wake up.")
        .def("wait", &Alarm::wait, "seconds"_a, "Sleep until it is set, which it is no more then; whether it was.");
    m.def("enlist_thread", [] { busy.enlisted = true; }, "The calling thread is one of this library.");
    m.def("yield_gil", &yield_gil, "Let threads of this library have the interpreter while they have work.");
}
