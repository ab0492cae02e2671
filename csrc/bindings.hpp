// What the files of the Python bindings share: the types of arrays, and the release of the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "token_runs.hpp"
#include "waiting.hpp"

namespace disagg::python {

namespace nb = nanobind;
using namespace nb::literals;

// Each adds its part of the module `disagg.core._native`.
void bind_spans(nb::module_& m);
void bind_work_lists(nb::module_& m);
void bind_waiting(nb::module_& m);

// ------------------------------------------------------------------------------------------------------------------- arrays

template <typename T>
using MutableColumn = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Column = MutableColumn<const T>;
using Addresses = Column<std::uint64_t>;
using RunTable = nb::ndarray<const std::int64_t, nb::shape<-1, 5>, nb::c_contig, nb::device::cpu>;
static_assert(sizeof(TokenRun) == 5 * sizeof(std::int64_t));

template <typename T>
std::span<T> view(const MutableColumn<T>& column) {
    return {column.data(), column.shape(0)};
}

inline std::span<const TokenRun> view(const RunTable& runs) {
    return {reinterpret_cast<const TokenRun*>(runs.data()), runs.shape(0)};
}

// ---------------------------------------------------------------------------------------------------------------------- GIL

// Releases the GIL for its lifetime. While the interpreter shuts down, Python 3.13 and older end a thread that takes the GIL by
// an exception, which must not leave a destructor. The thread then stays here for ever, as it does in newer versions.
class ReleaseGil {
  public:
    ReleaseGil() = default;
    ReleaseGil(const ReleaseGil&) = delete;
    ReleaseGil& operator=(const ReleaseGil&) = delete;
    ~ReleaseGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }

  private:
    PyThreadState* const state_ = PyEval_SaveThread();
};

// Releases the GIL while the thread waits for work. The thread is not busy meanwhile; a registered thread is busy afterwards.
class ReleaseGilToWait {
  public:
    ReleaseGilToWait() { this_thread_state.set_busy(false); }
    ReleaseGilToWait(const ReleaseGilToWait&) = delete;
    ReleaseGilToWait& operator=(const ReleaseGilToWait&) = delete;
    ~ReleaseGilToWait() { this_thread_state.set_busy(this_thread_state.is_registered()); }

  private:
    const ReleaseGil released_;
};

// Releases the GIL while the thread does work that does not need it. Other threads need not yield the GIL to it meanwhile.
class ReleaseGilToWork {
  public:
    ReleaseGilToWork() : was_busy_{this_thread_state.set_busy(false)} {}
    ReleaseGilToWork(const ReleaseGilToWork&) = delete;
    ReleaseGilToWork& operator=(const ReleaseGilToWork&) = delete;
    ~ReleaseGilToWork() { this_thread_state.set_busy(was_busy_); }

  private:
    const ReleaseGil released_;
    const bool was_busy_;
};

// Releases the GIL for work on `num_items`, if that takes more than a few microseconds. To take the GIL back may take
// milliseconds while another thread computes in Python.
class ReleaseGilIfLarge {
  public:
    explicit ReleaseGilIfLarge(std::size_t num_items) {
        if (num_items >= kLeastItems) released_.emplace();
    }

  private:
    static constexpr std::size_t kLeastItems = 4096;
    std::optional<ReleaseGilToWork> released_;
};

}  // namespace disagg::python
