// Python bindings of waiting without the GIL, and of CUDA queues and events.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "cuda_queue.hpp"
#include "waiting.hpp"

namespace disagg::python {

namespace {

// The object's value. `nb::cast` gives a null pointer for None, so this checks the type itself.
template <typename T>
const T* value_of(nb::handle object, const char* message) {
    if (!nb::isinstance<T>(object)) throw nb::type_error(message);
    return nb::inst_ptr<T>(object);
}

// ------------------------------------------------------------------------------------------------------------------- CUDA

// A queue whose calls release the GIL or hold it. They are short, and a thread that releases the GIL may wait milliseconds for
// it while other threads of this library need it.
struct GilCudaQueue : CudaQueue {
    bool holds_gil;

    GilCudaQueue(const std::string& library, std::uintptr_t context, std::uintptr_t stream, std::uintptr_t uploads, bool holds)
        : CudaQueue{library, context, stream, uploads}, holds_gil{holds} {}

    std::unique_ptr<ReleaseGilToWork> release() const { return holds_gil ? nullptr : std::make_unique<ReleaseGilToWork>(); }
};

// An event; keeps its queue alive.
struct HeldCudaEvent : CudaEvent {
    nb::object held;

    HeldCudaEvent(nb::object queue_, std::uintptr_t event_)
        : CudaEvent{value_of<GilCudaQueue>(queue_, "queue: expected a CudaQueue"), event_}, held{std::move(queue_)} {}
};

using Status = std::tuple<const char*, int>;

Status upload(const GilCudaQueue& queue, std::uint64_t device, std::uintptr_t host, std::size_t nbytes,
              std::uintptr_t uploaded) {
    const auto released = queue.release();
    const auto [call, status] = queue.upload(device, host, nbytes, uploaded);
    return {call, status};
}

Status launch(const GilCudaQueue& queue, std::uintptr_t kernel, const std::vector<std::uint64_t>& arguments, unsigned blocks,
              unsigned threads, unsigned shared, std::uintptr_t done) {
    const auto released = queue.release();
    const auto [call, status] = queue.launch(kernel, arguments, blocks, threads, shared, done);
    return {call, status};
}

Status query(const GilCudaQueue& queue, std::uintptr_t event) {
    const auto released = queue.release();
    const auto [call, status] = queue.query(event);
    return {call, status};
}

// ---------------------------------------------------------------------------------------------------------------- waiting

bool busy_poll_flag(Flag& flag, double seconds) {
    const Flag::Waiter waiter(flag);
    const ReleaseGil released;
    return busy_poll(seconds, [&] { return flag.is_set(); });
}

void yield_to_waiter(const Flag& flag) {
    if (!flag.has_waiters()) return;
    const ReleaseGil released;
    flag.wait_for_waiters();
}

using Descriptors = std::optional<Column<std::int32_t>>;

std::vector<pollfd> watched_of(const Descriptors& descriptors) {
    return descriptors ? watch_readable(view(*descriptors)) : std::vector<pollfd>{};
}

bool busy_poll_all(double seconds, const Descriptors& descriptors, const nb::list& completions) {
    std::vector<pollfd> watched = watched_of(descriptors);
    std::vector<nb::object> held;  // other threads may change the list meanwhile
    Completions awaited;
    for (const nb::handle each : completions) {
        held.push_back(nb::borrow(each));
        if (nb::isinstance<Flag>(each)) {
            awaited.flags.push_back(nb::inst_ptr<Flag>(each));
        } else {
            awaited.events.push_back(*value_of<HeldCudaEvent>(each, "completions: expected only Flag and CudaEvent"));
        }
    }
    const ReleaseGilToWait released;
    return busy_poll(seconds, [&] { return awaited.poll() || any_readable(watched); });
}

void sleep(double seconds) {
    const ReleaseGilToWait released;
    sleep_until_readable(seconds, {});
}

bool wait_for_alarm(Alarm& alarm, double seconds, const Descriptors& descriptors) {
    std::vector<pollfd> watched = watched_of(descriptors);
    const ReleaseGilToWait released;
    return alarm.wait(seconds, std::move(watched));
}

// Releases the GIL to registered threads until none has work, for up to 1 ms. Unless `always`, it does nothing for as long
// after that as it took.
void yield_gil(bool always) {
    using Clock = std::chrono::steady_clock;
    static std::atomic<Clock::time_point> next{Clock::time_point{}};
    if (num_busy_threads.load() == 0) return;
    const auto started = Clock::now();
    if (!always && started < next.load()) return;
    {
        const ReleaseGil released;
        wait_until_none_busy(started + std::chrono::milliseconds(1));
    }
    const auto ended = Clock::now();
    next.store(ended + (ended - started));
}

// ---------------------------------------------------------------------------------------------------------------- sockets

bool is_readable(int descriptor) {
    pollfd watched{descriptor, POLLIN, 0};
    return any_readable({&watched, 1});
}

void bind_cuda(nb::module_& m) {
    nb::class_<GilCudaQueue>(m, "CudaQueue", "Work for one stream of a CUDA context; loads the driver by name.")
        .def(nb::init<const std::string&, std::uintptr_t, std::uintptr_t, std::uintptr_t, bool>(), "library"_a, "context"_a,
             "stream"_a, "uploads"_a, nb::kw_only(), "holds_gil"_a = false)
        .def("upload", &upload, "device"_a, "host"_a, "nbytes"_a, "uploaded"_a, "Copy to the GPU, before later launches.")
        .def("launch", &launch, "kernel"_a, "arguments"_a, "blocks"_a, "threads"_a, "shared"_a, "done"_a,
             "Launch a kernel, and record an event behind it.")
        .def("query", &query, "event"_a, "The status of an event.");
    nb::class_<HeldCudaEvent>(m, "CudaEvent", "An event that is recorded on a queue's stream.")
        .def(nb::init<nb::object, std::uintptr_t>(), "queue"_a, "event"_a);
}

void bind_completions(nb::module_& m) {
    nb::class_<Flag>(m, "Flag", "A flag that any thread may set, once.")
        .def(nb::init<>())
        .def("set", &Flag::set)
        .def("yield_to_waiter", &yield_to_waiter, "Let the threads that busy-poll the flag take the GIL first, once it is set.")
        .def("busy_poll", &busy_poll_flag, "seconds"_a,
             "Wait up to `seconds` for the flag, without sleeping and without the GIL. Returns whether it is set.");
}

}  // namespace

void bind_waiting(nb::module_& m) {
    bind_cuda(m);
    bind_completions(m);
    m.def("is_readable", &is_readable, "descriptor"_a,
          "Whether a descriptor is readable or closed by its peer; holds the GIL.");
    m.def("busy_poll", &busy_poll_all, "seconds"_a, "descriptors"_a.noconvert() = nb::none(), "completions"_a = nb::list(),
          "Wait without sleeping until a descriptor is readable or something has completed. Returns whether that is so.");
    m.def("sleep", &sleep, "seconds"_a, "Sleep.");
    nb::class_<Alarm>(m, "Alarm", "Wakes a sleeping thread.")
        .def(nb::init<>())
        .def("fileno", &Alarm::descriptor, "Readable while the alarm is set.")
        .def("set", &Alarm::set, "Wake the thread that waits, or the next one to wait.")
        .def("clear", &Alarm::clear, "Take back what was set. Returns whether it was set.")
        .def(
            "wait", &wait_for_alarm, "seconds"_a, "descriptors"_a.noconvert() = nb::none(),
            "Sleep up to `seconds` until the alarm is set or a descriptor is readable, and clear the alarm. Returns whether it "
            "was set.");
    m.def(
        "enlist_thread",
        [] {
            this_thread_state.set_registered();
            allow_calls_during_capture();
        },
        "Register the calling thread as one of this library. Includes `allow_calls_during_capture`.");
    m.def("allow_calls_during_capture", &allow_calls_during_capture,
          "Let the calling thread use the CUDA driver while another thread captures a CUDA graph.");
    m.def("yield_gil", &yield_gil, nb::kw_only(), "always"_a = false,
          "Let the registered threads that have work take the GIL.");
}

}  // namespace disagg::python
