// What the tests share: checks, and the list of all tests. They need no Python and no test framework.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <stdexcept>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (false)

inline constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

// Whether the function throws `std::invalid_argument`.
template <typename Function>
bool refuses(const Function& function) {
    try {
        function();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

void test_work_lists(std::mt19937_64& random);
void test_edges_of_runs();
void test_random_runs(std::mt19937_64& random);
void test_located_ranges(std::mt19937_64& random);
void test_refused_ranges();
void test_process_copies(std::mt19937_64& random);
void test_refused_copies();
void test_refused_packs();
void test_token_runs(std::mt19937_64& random);
void test_extreme_token_runs();
void test_expand(std::mt19937_64& random);
void test_refused_expand();
void test_large_expand();
void test_digests(std::mt19937_64& random);
void test_refused_digests();
void test_copies(std::mt19937_64& random);
void test_busy_poll();
void test_flag_waiters();
void test_alarm();
void test_alarm_counts();
void test_busy_threads();
void test_sleep_until_readable();
