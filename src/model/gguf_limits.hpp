// Private to model/: what a GGUF file may claim, for its reader and its writer.
#pragma once

#include <cstdint>

namespace tidelock::model::gguf_limits {

inline constexpr std::uint32_t magic = 0x46554747U;  // "GGUF"
inline constexpr std::uint32_t version = 3;
inline constexpr std::uint64_t key_bytes = 65535;            // of a key's name
inline constexpr std::uint64_t name_bytes = 63;              // of a tensor's name: ggml keeps 64 with the final zero
inline constexpr std::uint64_t string_bytes = 64 << 20;      // of a value
inline constexpr std::uint64_t array_elements = 1 << 24;     // of an array; a vocabulary has 163840
inline constexpr std::uint64_t header_bytes = 512ULL << 20;  // of all keys together
inline constexpr std::uint64_t keys = 1 << 16, tensors = 1 << 20;
inline constexpr std::uint64_t alignment = 1 << 20;
inline constexpr std::uint64_t parts = 99999;

}  // namespace tidelock::model::gguf_limits
