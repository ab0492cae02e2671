// Which regions contain ranges of memory, against a search of all of them.
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "regions.hpp"
#include "tests.hpp"

namespace {

using Words = std::vector<std::uint64_t>;

}  // namespace

void test_located_ranges(std::mt19937_64& random) {
    constexpr std::uint64_t kTop = std::numeric_limits<std::uint64_t>::max();
    for (int round = 0; round < 5000; ++round) {
        Words starts, stops, devices;
        // Regions may be adjacent, and the last one may end at the end of the address space.
        std::uint64_t at = random() % 2 == 0 ? random() % 20 : kTop - 300;
        for (std::size_t k = random() % 6; k > 0; --k) {
            at += random() % 3 * (random() % 10);
            starts.push_back(at);
            at += 1 + random() % 30;
            stops.push_back(at);
            devices.push_back(random() % 8);
        }
        const std::size_t count = random() % 20;
        Words addresses(count), nbytes(count);
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t k = starts.empty() ? 0 : random() % starts.size();
            const bool inside = !starts.empty() && random() % 12 != 0;
            addresses[i] = inside ? starts[k] + random() % (stops[k] - starts[k]) : random();
            nbytes[i] = inside ? random() % (stops[k] - addresses[i] + 1) : random() % 9 == 0 ? random() : random() % 40;
        }
        const auto holds = [&](std::size_t k, std::size_t i) {  // without a sum that could wrap
            return starts[k] <= addresses[i] && addresses[i] <= stops[k] && stops[k] - addresses[i] >= nbytes[i];
        };
        const auto held = [&](std::size_t i) {
            for (std::size_t k = 0; k < starts.size(); ++k) {
                if (holds(k, i)) return true;
            }
            return false;
        };
        std::size_t expected = 0;
        while (expected < count && held(expected)) ++expected;

        const disagg::RegionColumns regions{starts, stops, devices};
        const disagg::RangeColumns ranges{addresses, nbytes};
        // Outputs of exactly the size requested, so that the sanitizers see a write beyond it. Entries from the first range
        // that no region contains must not change.
        std::vector<std::int64_t> where(count, -7);
        std::vector<disagg::Descriptor> rows(count, {7, 7, 7});
        CHECK(disagg::locate(regions, ranges, where) == expected);
        CHECK(disagg::describe(regions, ranges, rows) == expected);
        CHECK(disagg::count_held(regions, ranges) == expected);
        for (std::size_t i = 0; i < count; ++i) {
            if (i >= expected) {
                CHECK(where[i] == -7 && rows[i].address == 7 && rows[i].nbytes == 7 && rows[i].device == 7);
                continue;
            }
            const auto k = static_cast<std::size_t>(where[i]);
            CHECK(where[i] >= 0 && k < starts.size() && holds(k, i));
            CHECK(rows[i].address == addresses[i] && rows[i].nbytes == nbytes[i] && rows[i].device == devices[k]);
        }
    }
}

void test_refused_ranges() {
    const Words one{1}, two{1, 2};
    std::vector<std::int64_t> room(1);
    const auto refused = [&](const disagg::RegionColumns& regions, const disagg::RangeColumns& ranges) {
        return refuses([&] { disagg::locate(regions, ranges, room); });
    };
    CHECK(refused({one, two, one}, {one, one}));
    CHECK(refused({one, one, two}, {one, one}));
    CHECK(refused({one, one, one}, {one, two}));
    CHECK(refused({one, one, one}, {two, two}));
    CHECK(!refused({two, two, two}, {one, one}));
}
