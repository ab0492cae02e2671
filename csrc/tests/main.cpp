// Runs the tests of the headers, which `make sanitize` builds with sanitizers. Exits with status 0 if all pass.
#include <cstdio>
#include <random>

#include "tests.hpp"

int main() {
    std::mt19937_64 random(20240607);
    test_work_lists(random);
    test_edges_of_runs();
    test_random_runs(random);
    test_located_ranges(random);
    test_refused_ranges();
    test_process_copies(random);
    test_refused_copies();
    test_refused_packs();
    test_token_runs(random);
    test_extreme_token_runs();
    test_expand(random);
    test_refused_expand();
    test_large_expand();
    test_digests(random);
    test_refused_digests();
    test_copies(random);
    test_busy_poll();
    test_flag_waiters();
    test_alarm();
    test_alarm_counts();
    test_busy_threads();
    test_sleep_until_readable();
    std::puts("csrc: all tests passed");
}
