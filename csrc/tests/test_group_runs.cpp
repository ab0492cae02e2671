// Runs of indices, against their definition.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "group_runs.hpp"
#include "tests.hpp"

namespace {

using Run = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

// The definition, one pair after the other.
template <typename S, typename D>
std::vector<Run> naive_runs(const std::vector<S>& source, const std::vector<D>& destination) {
    std::vector<Run> runs;
    bool open = false;
    for (std::size_t i = 0; i < source.size(); ++i) {
        const std::int64_t s = source[i], d = destination[i];
        if (s < 0 || d < 0) {
            open = false;
            continue;
        }
        if (open) {
            auto& [first_s, first_d, length] = runs.back();
            if (s - first_s == length && d - first_d == length) {
                ++length;
                continue;
            }
        }
        runs.emplace_back(s, d, 1);
        open = true;
    }
    return runs;
}

// Writes into columns of exactly the size requested, so that the sanitizers see a write beyond it.
template <typename S, typename D>
std::vector<Run> runs_of(const std::vector<S>& source, const std::vector<D>& destination) {
    using Groups = disagg::RunGroups<S, D>;
    const auto words = std::make_unique<std::uint64_t[]>(Groups::num_words(source.size()));
    const Groups groups(source, destination, words.get());
    const std::size_t count = groups.num_runs();
    const auto column = [count] { return std::make_unique<std::int64_t[]>(count); };
    const auto s = column(), d = column(), n = column();
    groups.write({s.get(), d.get(), n.get()});
    std::vector<Run> runs;
    for (std::size_t k = 0; k < count; ++k) runs.emplace_back(s[k], d[k], n[k]);
    return runs;
}

// Whether all scans that this processor supports give the same result.
template <typename S, typename D>
bool scans_agree(const std::vector<S>& source, const std::vector<D>& destination) {
    namespace detail = disagg::detail;
    const auto scanned = [&](auto scan) {
        std::vector<std::uint64_t> words(disagg::RunGroups<S, D>::num_words(source.size()));
        words.push_back(scan(source.data(), destination.data(), source.size(), words.data()));
        return words;
    };
    const auto expected = scanned(detail::scan_any<S, D>);
    bool agree = true;
#if defined(DISAGG_GROUP_AVX)
    if (__builtin_cpu_supports("avx2")) agree &= scanned(detail::scan_avx2<S, D>) == expected;
    if (detail::has_avx512()) agree &= scanned(detail::scan_avx512<S, D>) == expected;
#endif
    return agree;
}

template <typename S, typename D>
void test_random_runs_of(std::mt19937_64& random) {
    for (int round = 0; round < 3000; ++round) {
        const std::size_t size = random() % 200;
        const std::uint64_t step_chance = random() % 101;
        std::vector<S> source(size);
        std::vector<D> destination(size);
        std::int64_t s = 0, d = 0;
        for (std::size_t i = 0; i < size; ++i) {
            const bool steps = random() % 100 < step_chance;
            s = steps ? s + 1 : static_cast<std::int64_t>(random() % 1000) - 20;
            d = steps || random() % 4 == 0 ? d + 1 : static_cast<std::int64_t>(random() % 1000) - 20;
            source[i] = static_cast<S>(s);
            destination[i] = static_cast<D>(d);
        }
        CHECK(runs_of(source, destination) == naive_runs(source, destination));
        CHECK(scans_agree(source, destination));
    }
}

}  // namespace

void test_random_runs(std::mt19937_64& random) {
    test_random_runs_of<std::int64_t, std::int64_t>(random);
    test_random_runs_of<std::int32_t, std::int32_t>(random);
    test_random_runs_of<std::int32_t, std::int64_t>(random);
    test_random_runs_of<std::int64_t, std::int32_t>(random);
}

void test_edges_of_runs() {
    using Ids = std::vector<std::int64_t>;
    CHECK(runs_of(Ids{}, Ids{}).empty());
    CHECK(runs_of(Ids{}, Ids{1, 2}).empty());
    CHECK(runs_of(Ids{1, 2}, Ids{}).empty());
    CHECK(runs_of(Ids{-1, 0, 1}, Ids{-1, 0, 1}) == (std::vector<Run>{{0, 0, 2}}));
    CHECK(runs_of(Ids{-3, -2, -1}, Ids{4, 5, 6}).empty());
    CHECK(runs_of(Ids{kMax - 1, kMax, -kMax - 1}, Ids{7, 8, 9}) == (std::vector<Run>{{kMax - 1, 7, 2}}));
    CHECK(runs_of(Ids{5, 6, 8}, Ids{1, 2, 3}) == (std::vector<Run>{{5, 1, 2}, {8, 3, 1}}));
    for (const std::size_t size : {1u, 31u, 32u, 33u, 34u, 64u, 65u, 1000u}) {
        Ids ids(size);
        std::iota(ids.begin(), ids.end(), std::int64_t{3});
        CHECK(runs_of(ids, ids) == (std::vector<Run>{{3, 3, static_cast<std::int64_t>(size)}}));
        ids.back() = -1;
        CHECK(runs_of(ids, ids) == naive_runs(ids, ids));
    }
    const Ids three{1, 2, 3}, two{1, 2};
    bool thrown = false;
    try {
        runs_of(three, two);
    } catch (const std::invalid_argument& error) {
        thrown = std::strstr(error.what(), "3") && std::strstr(error.what(), "2");
    }
    CHECK(thrown);
}
