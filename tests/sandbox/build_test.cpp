// Recipes, tar archives and layers, without a guest.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "base/base.hpp"
#include "sandbox/build/recipe.hpp"
#include "sandbox/oci/unpack.hpp"
#include "sandbox/support.hpp"

namespace tidelock::sandbox {
namespace {

namespace fs = std::filesystem;
using testing::code_of;
using testing::Folder;
using Kind = BuildStep::Kind;

// One entry of a ustar archive, padded.
std::string tar_entry(const std::string& name, char type, const std::string& content = "",
                      const std::string& target = "") {
  std::string block(512, '\0');
  const auto put = [&block](std::size_t at, const std::string& text) { block.replace(at, text.size(), text); };
  put(0, name), put(100, "0000644"), put(108, "0000000"), put(116, "0000000");
  put(124, fmt::format("{:011o}", content.size())), put(136, "00000000000"), put(157, target);
  block[156] = type;
  put(257, std::string("ustar\0"
                       "00",
                       8));
  put(148, "        ");
  unsigned sum = 0;
  for (const char c : block) {
    sum += static_cast<unsigned char>(c);
  }
  put(148, fmt::format("{:06o}", sum) + std::string("\0 ", 2));
  return block + content + std::string((512 - content.size() % 512) % 512, '\0');
}

oci::Source source_of(const std::string& bytes) {
  return [bytes, at = std::size_t{0}](char* to, std::size_t size) mutable {
    const std::size_t take = std::min({size, bytes.size() - at, std::size_t{7}});  // in small parts
    bytes.copy(to, take, at);
    at += take;
    return take;
  };
}

std::string pax(const std::string& record) {
  return tar_entry("pax", 'x', record);
}

TEST(Tar, LongNamesComeFromPaxAndGnuRecords) {
  const std::string name(180, 'n'), body = " path=" + name + "\n";
  const std::string record = std::to_string(body.size() + 3) + body;
  oci::TarReader reader(source_of(pax(record) + tar_entry("short", '0', "first") + tar_entry("long", 'L', name + '\0') +
                                  tar_entry("short", '0', "second!") + std::string(1024, '\0')),
                        "archive");
  oci::TarEntry entry;
  for (const std::string wanted : {"first", "second!"}) {
    ASSERT_TRUE(reader.next(entry));
    EXPECT_EQ(entry.path, name);
    std::string content;
    char part[3];
    for (std::size_t got = 0; (got = reader.read(part, sizeof part)) > 0;) {
      content.append(part, got);
    }
    EXPECT_EQ(content, wanted);
  }
  EXPECT_FALSE(reader.next(entry));
}

TEST(Tar, WhatCannotBeReadIsRefused) {
  const auto code = [](const std::string& bytes) {
    return code_of([&] {
      oci::TarReader reader(source_of(bytes), "archive");
      oci::TarEntry entry;
      while (reader.next(entry)) {
      }
    });
  };
  std::string damaged = tar_entry("a", '0');
  damaged[5] = 'x';
  EXPECT_EQ(code(damaged), ErrorCode::corrupt_data);
  EXPECT_EQ(code(tar_entry("a", '0', "cut short").substr(0, 514)), ErrorCode::corrupt_data);
  EXPECT_EQ(code(tar_entry("a/../../b", '0')), ErrorCode::corrupt_data);
  EXPECT_EQ(code(tar_entry("a", '1', "", "../b")), ErrorCode::corrupt_data);
  EXPECT_EQ(code(tar_entry("a", 'S')), ErrorCode::not_supported);
  EXPECT_EQ(code(pax("99 path=a\n")), ErrorCode::corrupt_data);
  EXPECT_EQ(code(pax("12 size=many\n")), ErrorCode::corrupt_data);
}

class Layers : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directory(root_);
    std::ofstream(top_ / "outside") << "untouched";
  }
  std::size_t apply(const std::string& layer, oci::UnpackLimits limits = {}) {
    return oci::apply_layer(source_of(layer), "layer", root_, limits);
  }
  const Folder folder_;
  const fs::path top_ = folder_.path(), root_ = top_ / "root";
};

TEST_F(Layers, LinksOfAnImageNeverLeadOutOfIt) {
  apply(tar_entry("up", '2', "", "../../..") + tar_entry("up/etc/passwd", '0', "of the image") +
        tar_entry(top_.string(), '5') + tar_entry("abs", '2', "", top_.string()) + tar_entry("abs/file", '0', "x"));
  EXPECT_EQ(read_file(root_ / "etc/passwd"), "of the image");
  EXPECT_EQ(read_file(root_.string() + top_.string() + "/file"), "x");
  EXPECT_FALSE(fs::exists(top_ / "file"));
  apply(tar_entry("link", '2', "", (top_ / "outside").string()) + tar_entry("link", '0', "replaces the link"));
  EXPECT_EQ(read_file(root_ / "link"), "replaces the link");
  EXPECT_EQ(read_file(top_ / "outside"), "untouched");
  const std::string astray = tar_entry("to_nothing", '2', "", "/absent") + tar_entry("to_nothing/file", '0', "x");
  EXPECT_EQ(code_of([&] { apply(astray); }), ErrorCode::corrupt_data);
}

TEST_F(Layers, WhiteoutsTakeAwayWhatIsBelowAndNothingElse) {
  apply(tar_entry("a", '0', "a") + tar_entry("d/old", '0', "o") + tar_entry("d/sub/old", '0', "o") +
        tar_entry("e", '0', "e"));
  apply(tar_entry("d/sub/new", '0', "n") + tar_entry("d/.wh..wh..opq", '0') + tar_entry(".wh.a", '0'));
  EXPECT_FALSE(fs::exists(root_ / "a"));
  EXPECT_FALSE(fs::exists(root_ / "d/old"));
  EXPECT_FALSE(fs::exists(root_ / "d/sub/old"));
  EXPECT_EQ(read_file(root_ / "d/sub/new"), "n");
  EXPECT_EQ(read_file(root_ / "e"), "e");
  EXPECT_EQ(code_of([&] { apply(tar_entry("d/.wh...", '0')); }), ErrorCode::corrupt_data);
}

TEST_F(Layers, BoundsAndWhatIsLeftOut) {
  EXPECT_EQ(code_of([&] { apply(tar_entry("a", '0', std::string(100, 'x')), {.bytes = 99}); }), ErrorCode::exhausted);
  EXPECT_EQ(code_of([&] { apply(tar_entry("a", '0') + tar_entry("b", '0'), {.entries = 1}); }), ErrorCode::exhausted);
  EXPECT_EQ(apply(tar_entry("dev/sda", '4') + tar_entry("dev/tty", '3')), 2U);
  EXPECT_FALSE(fs::exists(root_ / "dev/sda"));
  apply(tar_entry("f", '0', "same") + tar_entry("hard", '1', "", "f"));
  EXPECT_TRUE(fs::equivalent(root_ / "f", root_ / "hard"));
  EXPECT_EQ(code_of([&] { apply(tar_entry("h", '1', "", "none")); }), ErrorCode::corrupt_data);
  EXPECT_EQ(code_of([&] { apply(tar_entry("f/below", '0')); }), ErrorCode::corrupt_data);
}

TEST(Recipe, StepsComeOutOfItsLines) {
  const BuildRecipe made = parse_recipe(
      "# note\nFROM template:base\nenv A=\"b c\" D='$E'\nRUN one \\\n  && two\nCOPY a b* dir\nWORKDIR ../x\nUSER root\n"
      "START serve --port 1\nREADY test -e /up\n",
      "recipe");
  EXPECT_EQ(made.snapshot, "base");
  ASSERT_EQ(made.steps.size(), 6U);
  EXPECT_EQ(made.steps[0].arguments, (std::vector<std::string>{"A", "b c", "D", "$E"}));
  EXPECT_EQ(made.steps[1].arguments, (std::vector<std::string>{"one  && two"}));
  EXPECT_EQ(made.steps[3].arguments, (std::vector<std::string>{"b*", "dir/"}));
  EXPECT_EQ(made.start, "serve --port 1");
  Defaults defaults;
  for (const BuildStep& step : made.steps) {
    defaults = after_step(defaults, step);
  }
  EXPECT_EQ(defaults.directory, "/x");  // from /root
  EXPECT_TRUE(defaults.root);
  EXPECT_EQ(defaults.environment.at("D"), "$E");
}

TEST(Recipe, FaultsAreRefused) {
  for (const char* wrong :
       {"", "RUN a", "FROM a\nFROM b", "FROM a\nRUN", "FROM a\nENV =x", "FROM a\nENV 'A=b", "FROM a\nUSER nobody",
        "FROM a\nCOPY /etc/passwd x", "FROM a\nCOPY a/../../b x", "FROM a\nCOPY x", "FROM a\nSTART a\nSTART b"}) {
    EXPECT_EQ(code_of([&] { parse_recipe(wrong, "recipe"); }), ErrorCode::invalid_argument) << wrong;
  }
  EXPECT_EQ(code_of([] { check_step({Kind::copy, {"a", "b", "", "9"}}); }), ErrorCode::invalid_argument);
  EXPECT_EQ(resolve_path("/a/b", "../../../c/./d/"), "/c/d");
  EXPECT_EQ(resolve_path("/a", "/"), "/");
}

}  // namespace
}  // namespace tidelock::sandbox
