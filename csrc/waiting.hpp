// Waiting for completions, and the count of threads that have work. Needs no Python: the bindings release the GIL around it.
#pragma once

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <ctime>
#include <mutex>
#include <span>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_queue.hpp"

namespace disagg {

// ---------------------------------------------------------------------------------------------------- threads that have work

// Registered threads that have work: those that do not wait in one of the functions here. Other threads yield the GIL to them.
inline std::atomic<int> num_busy_threads = 0;

// Counts one thread in `num_busy_threads` while it is registered and has work.
class ThreadState {
  public:
    ThreadState() = default;
    ThreadState(const ThreadState&) = delete;
    ThreadState& operator=(const ThreadState&) = delete;
    ~ThreadState() { set_busy(false); }

    // The thread becomes busy when its next wait ends.
    void set_registered() { is_registered_ = true; }
    bool is_registered() const { return is_registered_; }
    bool is_busy() const { return is_busy_; }

    // Returns whether the thread was busy before.
    bool set_busy(bool is_busy) {
        if (is_busy != is_busy_) num_busy_threads += is_busy ? 1 : -1;
        return std::exchange(is_busy_, is_busy);
    }

  private:
    bool is_registered_ = false;
    bool is_busy_ = false;
};
inline thread_local ThreadState this_thread_state;

// Call this in the child of a fork: only the calling thread exists there.
inline void recount_busy_threads() { num_busy_threads = this_thread_state.is_busy() ? 1 : 0; }

// Waits until no registered thread has work, or until `end`.
inline void wait_until_none_busy(std::chrono::steady_clock::time_point end) {
    while (num_busy_threads.load() > 0 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

// ----------------------------------------------------------------------------------------------------------- completions

// Calls `is_done` without sleeping until it returns true or `seconds` have passed; returns its last result.
template <typename IsDone>
bool busy_poll(double seconds, const IsDone& is_done) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    bool done = is_done();
    while (!done && std::chrono::steady_clock::now() < end) {
        std::this_thread::yield();
        done = is_done();
    }
    return done;
}

// A flag that any thread may set, once.
class Flag {
  public:
    // Counts a waiting thread. It counts until it holds the GIL again, so this must outlive the release of the GIL.
    class Waiter {
      public:
        explicit Waiter(Flag& flag) : flag_{flag} { ++flag_.num_waiters_; }
        ~Waiter() { --flag_.num_waiters_; }
        Waiter(const Waiter&) = delete;
        Waiter& operator=(const Waiter&) = delete;

      private:
        Flag& flag_;
    };

    void set() { is_set_.store(true); }
    bool is_set() const { return is_set_.load(); }
    bool has_waiters() const { return num_waiters_.load() > 0; }

    // Waits until no thread waits for the flag, for at most 20 us. Without this head start a waiter finds the GIL taken and
    // sleeps; to wake up takes it longer than everything else.
    void wait_for_waiters() const {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
        while (has_waiters() && std::chrono::steady_clock::now() < end) {
        }
    }

  private:
    std::atomic<bool> is_set_ = false;
    std::atomic<int> num_waiters_ = 0;
};

// What one call of `busy_poll` waits for.
struct Completions {
    std::vector<const Flag*> flags;
    std::vector<CudaEvent> events;

    // Returns whether any has completed.
    bool poll() const {
        return std::any_of(flags.begin(), flags.end(), [](const Flag* flag) { return flag->is_set(); }) ||
               std::any_of(events.begin(), events.end(), [](const CudaEvent& event) { return event.is_done(); });
    }
};

// --------------------------------------------------------------------------------------------------------------- sleeping

// The longest sleep in seconds: the caller looks at its timers again after that.
inline constexpr double kLongestSleep = 3600.0;

inline std::vector<pollfd> watch_readable(std::span<const std::int32_t> descriptors) {
    std::vector<pollfd> watched;
    for (const std::int32_t descriptor : descriptors) watched.push_back({descriptor, POLLIN, 0});
    return watched;
}

// Returns at once whether a descriptor is readable or closed by its peer.
inline bool any_readable(std::span<pollfd> watched) { return ::poll(watched.data(), watched.size(), 0) > 0; }

// Sleeps until a descriptor is readable, or for `seconds`.
inline void sleep_until_readable(double seconds, std::span<pollfd> watched) {
    const double bounded = std::clamp(seconds, 0.0, kLongestSleep);
    const auto whole = static_cast<std::time_t>(bounded);
    const timespec timeout{whole, static_cast<long>((bounded - static_cast<double>(whole)) * 1e9)};
    ::ppoll(watched.data(), watched.size(), &timeout, nullptr);
}

// Wakes a sleeping thread. It stays set until one wait has returned true. One thread waits at a time.
//
// From `set` on, a thread that sleeps counts as one that has work: otherwise nobody would yield the GIL to it before it is
// awake.
class Alarm {
  public:
    Alarm() : descriptor_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)} {
        if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    }
    Alarm(const Alarm&) = delete;
    Alarm& operator=(const Alarm&) = delete;
    ~Alarm() { ::close(descriptor_); }

    // Readable while the alarm is set.
    int descriptor() const { return descriptor_; }

    void set() {
        const std::lock_guard<std::mutex> locked(mutex_);
        if (std::exchange(is_set_, true)) return;
        if (sleeps_) {
            is_counted_ = true;
            ++num_busy_threads;
        }
        ::eventfd_write(descriptor_, 1);
    }

    // Sleeps until the alarm is set or one of `watched` is readable, or for `seconds`. Returns whether it was set, and clears
    // it.
    bool wait(double seconds, std::vector<pollfd> watched = {}) {
        {
            const std::lock_guard<std::mutex> locked(mutex_);
            sleeps_ = this_thread_state.is_registered();
            this_thread_state.set_busy(false);
        }
        watched.push_back({descriptor_, POLLIN, 0});
        sleep_until_readable(seconds, watched);
        const std::lock_guard<std::mutex> locked(mutex_);
        this_thread_state.set_busy(std::exchange(sleeps_, false));
        if (std::exchange(is_counted_, false)) --num_busy_threads;
        return clear_locked();
    }

    // Returns whether it was set.
    bool clear() {
        const std::lock_guard<std::mutex> locked(mutex_);
        return clear_locked();
    }

  private:
    bool clear_locked() {
        if (!std::exchange(is_set_, false)) return false;
        eventfd_t count;
        ::eventfd_read(descriptor_, &count);
        return true;
    }

    const int descriptor_;
    std::mutex mutex_;
    bool is_set_ = false;
    bool sleeps_ = false;      // a registered thread sleeps here
    bool is_counted_ = false;  // in `num_busy_threads`, for that thread
};

}  // namespace disagg
