#include "state/state.hpp"

#include <cstring>
#include <new>
#include <utility>

namespace tidelock::state {
namespace {

constexpr std::align_val_t kAlign{64};

std::byte* take(std::vector<std::byte*>& free, std::size_t bytes, std::size_t& count) {
  if (!free.empty()) {
    std::byte* p = free.back();
    free.pop_back();
    return p;
  }
  ++count;
  return static_cast<std::byte*>(::operator new(bytes, kAlign));
}

}  // namespace

Pool::~Pool() {
  for (std::byte* p : free_blocks_) ::operator delete(p, kAlign);
  for (std::byte* p : free_slots_) ::operator delete(p, kAlign);
}

std::byte* Pool::take_block() {
  const std::lock_guard lock(mutex_);
  return take(free_blocks_, layout_.block_bytes(), blocks_);
}

std::byte* Pool::take_slot() {
  std::byte* slot = nullptr;
  {
    const std::lock_guard lock(mutex_);
    slot = take(free_slots_, layout_.recurrent_bytes(), slots_);
  }
  std::memset(slot, 0, layout_.recurrent_bytes());
  return slot;
}

void Pool::give_block(std::byte* block) {
  const std::lock_guard lock(mutex_);
  free_blocks_.push_back(block);
}

void Pool::give_slot(std::byte* slot) {
  const std::lock_guard lock(mutex_);
  free_slots_.push_back(slot);
}

std::size_t Pool::allocated_bytes() const {
  const std::lock_guard lock(mutex_);
  return blocks_ * layout_.block_bytes() + slots_ * layout_.recurrent_bytes();
}

SequenceState::SequenceState(Pool& pool) : pool_(&pool) {
  if (pool.layout().recurrent_bytes() != 0) slot_ = pool.take_slot();
}

SequenceState::~SequenceState() {
  for (std::byte* block : blocks_) pool_->give_block(block);
  if (slot_ != nullptr) pool_->give_slot(slot_);
}

SequenceState::SequenceState(SequenceState&& other) noexcept
    : pool_(other.pool_), blocks_(std::move(other.blocks_)), slot_(other.slot_), position_(other.position_) {
  other.blocks_.clear();
  other.slot_ = nullptr;
}

SequenceState& SequenceState::operator=(SequenceState&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(blocks_, other.blocks_);
  std::swap(slot_, other.slot_);
  std::swap(position_, other.position_);
  return *this;
}

model::SequenceView SequenceState::extend(std::int64_t tokens) {
  const auto wanted = static_cast<std::size_t>(model::StateLayout::blocks_for(position_ + tokens));
  while (pool_->layout().block_bytes() != 0 && blocks_.size() < wanted) blocks_.push_back(pool_->take_block());
  return {blocks_.data(), slot_};
}

SequenceState SequenceState::fork() const {
  SequenceState copy(*pool_);
  for (const std::byte* block : blocks_) {
    copy.blocks_.push_back(pool_->take_block());
    std::memcpy(copy.blocks_.back(), block, pool_->layout().block_bytes());
  }
  if (slot_ != nullptr) std::memcpy(copy.slot_, slot_, pool_->layout().recurrent_bytes());
  copy.position_ = position_;
  return copy;
}

void SequenceState::reset() {
  if (slot_ != nullptr) std::memset(slot_, 0, pool_->layout().recurrent_bytes());
  position_ = 0;
}

}  // namespace tidelock::state
