// Work lists: their sizes and tiles.
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "tests.hpp"
#include "work_list.hpp"

void test_work_lists(std::mt19937_64& random) {
    for (int round = 0; round < 300; ++round) {
        std::vector<disagg::SpanSize> sizes;
        std::vector<std::int64_t> at;
        for (std::uint64_t i = 0; i < 1 + random() % 4; ++i) {
            sizes.push_back({1 + random() % 3, 1 + random() % 40, 1 + random() % 5, random() % 2 == 0});
            at.push_back(static_cast<std::int64_t>(random() % 1000));
        }
        std::vector<std::vector<disagg::TokenRun>> tables(1 + random() % 3);
        for (auto& table : tables) {
            for (std::uint64_t i = 0; i < random() % 7; ++i) {
                const auto value = [&] { return static_cast<std::int64_t>(random() % 50); };
                table.push_back({value(), value(), value(), value(), 1 + value()});
            }
        }
        const std::vector<std::int64_t> chosen{0, 2, 1};
        std::vector<disagg::WorkPart> parts;
        std::uint64_t total = 0;
        for (std::uint64_t i = 0; i < random() % 6; ++i) {
            parts.push_back({random() % sizes.size(), std::nullopt, tables[random() % tables.size()]});
            const std::uint64_t some = random() % (chosen.size() + 1);
            if (random() % 2) parts.back().bases = std::span(chosen).first(some);
            std::uint64_t positions = 0;
            for (const auto& run : parts.back().runs) positions += static_cast<std::uint64_t>(run.length);
            const disagg::SpanSize& size = sizes[parts.back().span];
            total += (parts.back().bases ? some : size.num_bases) * positions * size.steps * size.nbytes;
        }
        disagg::WorkList list(sizes, parts);
        CHECK(list.total_nbytes() == total);
        std::vector<std::uint64_t> words(list.num_words());
        const std::uint64_t tile = 1 + random() % 100;
        CHECK(list.encode(at, tile, words) <= 8 * words.size());
        if (total == 0) continue;
        std::uint64_t end = list.tiles(0, 1).second;
        CHECK(list.tiles(0, 1).first == 0);
        for (std::uint64_t low = 0; low < total; low += 1 + random() % 50) {
            const std::uint64_t first = list.tiles(low, low + 1).first;
            CHECK(first < list.tiles(low, total).second && first + 1 >= end);
            end = first + 1;
        }
    }
}
