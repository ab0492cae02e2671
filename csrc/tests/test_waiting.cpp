// Waits, flags, signals and alarms, and the count of busy threads.
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "tests.hpp"
#include "waiting.hpp"

void test_busy_poll() {
    int calls = 0;
    CHECK(disagg::busy_poll(60.0, [&] { return ++calls == 3; }));
    CHECK(calls == 3);
    CHECK(!disagg::busy_poll(0.0, [&] { return ++calls < 0; }));
    CHECK(calls == 4);
    CHECK(disagg::busy_poll(0.0, [] { return true; }));
}

void test_flag_waiters() {
    disagg::Flag flag;
    CHECK(!flag.is_set() && !flag.has_waiters());
    flag.wait_for_waiters();
    {
        const disagg::Flag::Waiter waiter(flag);
        CHECK(flag.has_waiters());
        flag.wait_for_waiters();  // gives up
    }
    CHECK(!flag.has_waiters());
    std::thread thread([&] { CHECK(disagg::busy_poll(60.0, [&] { return flag.is_set(); })); });
    flag.set();
    thread.join();
}

void test_alarm() {
    disagg::Alarm alarm;
    CHECK(!alarm.wait(0.0) && !alarm.wait(-1.0));
    alarm.set();
    alarm.set();
    CHECK(alarm.wait(60.0) && !alarm.wait(0.0));
    std::thread thread([&] { alarm.set(); });
    CHECK(alarm.wait(std::numeric_limits<double>::infinity()));
    thread.join();
    CHECK(!alarm.clear());
    alarm.set();
    std::vector<pollfd> watched = disagg::watch_readable(std::vector<std::int32_t>{alarm.descriptor()});
    CHECK(disagg::any_readable(watched) && alarm.clear() && !disagg::any_readable(watched) && !alarm.wait(0.0));

    int ends[2];
    CHECK(pipe(ends) == 0);
    CHECK(write(ends[1], "x", 1) == 1);
    CHECK(!alarm.wait(60.0, disagg::watch_readable(std::vector<std::int32_t>{ends[0]})));
    close(ends[0]);
    close(ends[1]);
}

void test_alarm_counts() {
    disagg::Alarm alarm;
    alarm.set();  // nobody sleeps
    CHECK(disagg::num_busy_threads == 0 && alarm.clear());
    std::atomic<bool> go_on = false;
    std::thread thread([&] {
        disagg::this_thread_state.set_registered();
        disagg::this_thread_state.set_busy(true);
        go_on = true;
        CHECK(alarm.wait(60.0) && disagg::this_thread_state.is_busy());
        CHECK(disagg::busy_poll(60.0, [&] { return go_on.load(); }));
    });
    CHECK(disagg::busy_poll(60.0, [&] { return go_on.load() && disagg::num_busy_threads == 0; }));
    go_on = false;
    alarm.set();  // before that thread is awake
    CHECK(disagg::num_busy_threads == 1);
    go_on = true;
    thread.join();
    CHECK(disagg::num_busy_threads == 0);
}

void test_busy_threads() {
    CHECK(disagg::num_busy_threads == 0);
    std::atomic<int> step = 0;
    const auto reach = [&](int next) { return disagg::busy_poll(60.0, [&] { return step.load() >= next; }); };
    std::thread thread([&] {
        disagg::ThreadState& state = disagg::this_thread_state;
        CHECK(!state.is_registered() && !state.set_busy(false));
        state.set_registered();
        CHECK(state.is_registered() && !state.is_busy() && !state.set_busy(true) && state.set_busy(true));
        step = 1;
        CHECK(reach(2));
    });
    CHECK(reach(1));
    CHECK(disagg::num_busy_threads == 1);
    const auto started = std::chrono::steady_clock::now();
    disagg::wait_until_none_busy(started + std::chrono::milliseconds(1));
    CHECK(std::chrono::steady_clock::now() >= started + std::chrono::milliseconds(1));
    step = 2;
    thread.join();  // a thread that ends is busy no longer
    CHECK(disagg::num_busy_threads == 0);
    disagg::wait_until_none_busy(std::chrono::steady_clock::now() + std::chrono::hours(1));
    disagg::num_busy_threads = 5;
    disagg::recount_busy_threads();
    CHECK(disagg::num_busy_threads == 0);
}

void test_sleep_until_readable() {
    int ends[2];
    CHECK(pipe(ends) == 0);
    const std::int32_t descriptors[]{ends[0]};
    std::vector<pollfd> watched = disagg::watch_readable(descriptors);
    CHECK(!disagg::any_readable(watched));
    disagg::sleep_until_readable(-1.0, watched);
    disagg::sleep_until_readable(1e-3, watched);
    CHECK(write(ends[1], "x", 1) == 1);
    disagg::sleep_until_readable(3600.0, watched);
    CHECK(disagg::any_readable(watched));
    close(ends[0]);
    close(ends[1]);
}
