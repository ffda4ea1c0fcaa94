#include "state/state.hpp"

#include <malloc.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace tidelock::state {
namespace {

constexpr std::align_val_t kAlign{64};

}  // namespace

Pool::~Pool() {
  for (std::byte* p : free_blocks_) ::operator delete(p, kAlign);
  for (std::byte* p : free_slots_) ::operator delete(p, kAlign);
}

// Idle blocks make room for slots and the other way round, so that the limit needs no split between them.
void Pool::give_back() {
  const std::lock_guard lock(mutex_);
  release_idle(0);
  ::malloc_trim(0);  // or the allocator keeps it
}

// As much of it as leaves `most` bytes allocated.
void Pool::release_idle(std::size_t most) {
  const auto release = [&](std::vector<std::byte*>& free, std::size_t bytes) {
    while (!free.empty() && allocated_ > most) {
      ::operator delete(free.back(), kAlign);
      free.pop_back();
      allocated_ -= bytes;
    }
  };
  release(free_blocks_, layout_.block_bytes());
  release(free_slots_, layout_.recurrent_bytes());
}

std::byte* Pool::take(std::vector<std::byte*>& free, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!free.empty()) {
    std::byte* p = free.back();
    free.pop_back();
    return p;
  }
  if (limit_ != kNoLimit) release_idle(limit_ > bytes ? limit_ - bytes : 0);
  auto* p = static_cast<std::byte*>(::operator new(bytes, kAlign));
  allocated_ += bytes;
  return p;
}

std::byte* Pool::take_block() {
  return take(free_blocks_, layout_.block_bytes());
}

std::byte* Pool::take_slot() {
  std::byte* slot = take(free_slots_, layout_.recurrent_bytes());
  std::memset(slot, 0, layout_.recurrent_bytes());
  return slot;
}

std::byte* Pool::take_raw_slot() {
  return take(free_slots_, layout_.recurrent_bytes());
}

std::byte* Pool::copy_slot(const std::byte* slot) {
  std::byte* copy = take_raw_slot();
  std::memcpy(copy, slot, layout_.recurrent_bytes());
  return copy;
}

void Pool::share_block(std::byte* block) {
  const std::lock_guard lock(mutex_);
  ++extra_[block];
}

void Pool::give_block(std::byte* block) {
  const std::lock_guard lock(mutex_);
  const auto extra = extra_.find(block);
  if (extra == extra_.end()) {
    free_blocks_.push_back(block);
  } else if (--extra->second == 0) {
    extra_.erase(extra);
  }
}

bool Pool::shared(const std::byte* block) const {
  const std::lock_guard lock(mutex_);
  return extra_.contains(block);
}

void Pool::give_slot(std::byte* slot) {
  const std::lock_guard lock(mutex_);
  free_slots_.push_back(slot);
}

std::size_t Pool::allocated_bytes() const {
  const std::lock_guard lock(mutex_);
  return allocated_;
}

std::size_t Pool::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return allocated_ - free_blocks_.size() * layout_.block_bytes() - free_slots_.size() * layout_.recurrent_bytes();
}

SequenceState::~SequenceState() {
  release();
}

SequenceState::SequenceState(SequenceState&& other) noexcept
    : pool_(other.pool_),
      blocks_(std::exchange(other.blocks_, {})),
      slot_(std::exchange(other.slot_, nullptr)),
      position_(std::exchange(other.position_, 0)) {}

SequenceState& SequenceState::operator=(SequenceState&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(blocks_, other.blocks_);
  std::swap(slot_, other.slot_);
  std::swap(position_, other.position_);
  return *this;
}

model::SequenceView SequenceState::extend(std::int64_t tokens) {
  const model::StateLayout& layout = pool_->layout();
  if (slot_ == nullptr && layout.recurrent_bytes() != 0) slot_ = pool_->take_slot();
  if (layout.block_bytes() == 0) return {blocks_.data(), slot_};
  const auto wanted = static_cast<std::size_t>(model::StateLayout::blocks_for(position_ + tokens));
  const auto first = static_cast<std::size_t>(position_ / numerics::kBlockTokens);
  for (std::size_t i = first; i < std::min(wanted, blocks_.size()); ++i) {
    if (!pool_->shared(blocks_[i])) continue;
    std::byte* own = pool_->take_block();
    if (i == first && position_ % numerics::kBlockTokens != 0) std::memcpy(own, blocks_[i], layout.block_bytes());
    pool_->give_block(std::exchange(blocks_[i], own));
  }
  while (blocks_.size() < wanted) blocks_.push_back(pool_->take_block());
  return {blocks_.data(), slot_};
}

SequenceState SequenceState::fork() const {
  SequenceState copy(*pool_);
  const auto used = static_cast<std::size_t>(model::StateLayout::blocks_for(position_));
  copy.blocks_.assign(blocks_.begin(), blocks_.begin() + static_cast<std::ptrdiff_t>(std::min(used, blocks_.size())));
  for (std::byte* block : copy.blocks_) pool_->share_block(block);
  if (slot_ != nullptr && position_ != 0) copy.slot_ = pool_->copy_slot(slot_);
  copy.position_ = position_;
  return copy;
}

void SequenceState::reset() {
  std::erase_if(blocks_, [this](std::byte* block) {
    const bool shared = pool_->shared(block);
    if (shared) pool_->give_block(block);
    return shared;
  });
  if (slot_ != nullptr) std::memset(slot_, 0, pool_->layout().recurrent_bytes());
  position_ = 0;
}

void SequenceState::release() {
  for (std::byte* block : blocks_) pool_->give_block(block);
  blocks_.clear();
  if (slot_ != nullptr) pool_->give_slot(std::exchange(slot_, nullptr));
  position_ = 0;
}

void SequenceState::trim() {
  const auto used = static_cast<std::size_t>(model::StateLayout::blocks_for(position_));
  while (blocks_.size() > used) {
    pool_->give_block(blocks_.back());
    blocks_.pop_back();
  }
}

void SequenceState::replace_block(std::size_t i, std::byte* block) {
  if (blocks_[i] == block) return;
  pool_->share_block(block);
  pool_->give_block(std::exchange(blocks_[i], block));
}

std::size_t SequenceState::bytes_to_extend(std::int64_t tokens) const {
  const model::StateLayout& layout = pool_->layout();
  std::size_t bytes = slot_ == nullptr ? layout.recurrent_bytes() : 0;
  if (layout.block_bytes() == 0 || tokens == 0) return bytes;
  const auto wanted = static_cast<std::size_t>(model::StateLayout::blocks_for(position_ + tokens));
  const auto first = static_cast<std::size_t>(position_ / numerics::kBlockTokens);
  for (std::size_t i = first; i < wanted; ++i)
    if (i >= blocks_.size() || pool_->shared(blocks_[i])) bytes += layout.block_bytes();
  return bytes;
}

std::size_t SequenceState::bytes() const {
  const model::StateLayout& layout = pool_->layout();
  return blocks_.size() * layout.block_bytes() + (slot_ == nullptr ? 0 : layout.recurrent_bytes());
}

}  // namespace tidelock::state
