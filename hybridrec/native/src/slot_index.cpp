#include "hybridrec/slot_index.h"

namespace hybridrec {

namespace {

constexpr size_t kAhead = 16;  // slots whose states are being fetched

}  // namespace

bool SlotIndex::grow(uint32_t num_slots) {
  const uint64_t bytes = bytes_for(num_slots);
  const uint64_t extra = bytes - bytes_;
  if (!budget_.try_take(extra)) return false;
  try {
    states_.reserve(num_slots);
    rows_.reserve(num_slots);
    uses_.reserve(uint64_t{num_slots} * 2);
    freed_.reserve(num_slots);
  } catch (...) {
    budget_.give_back(extra);
    throw;
  }
  bytes_ = bytes;
  for (uint32_t slot = num_slots_; slot < num_slots; ++slot) rows_[slot] = kNoRow;
  num_slots_ = num_slots;
  return true;
}

// The loops over a batch's slots keep their totals in registers: members would be stored and reloaded at every slot.
void SlotIndex::use_all(const uint32_t* slots, uint32_t n, uint32_t plan, bool do_pin, uint32_t* old_uses) {
  SlotState* states = states_.data();
  SlotUse* uses = uses_.data() + end_;
  const uint32_t pin = do_pin ? 1 : 0;
  uint64_t newly_pinned = 0;
  for (uint32_t u = 0; u < n; ++u) {
    prefetch_for_write(&states[slots[std::min<size_t>(u + kAhead, n - 1)]]);
    const uint32_t slot = slots[u];
    SlotState state = states[slot];
    old_uses[u] = state.last_use;
    newly_pinned += state.pins == 0;
    state.last_use = plan;
    state.pins += pin;
    states[slot] = state;
    uses[u] = {slot, plan, u};
  }
  end_ += n;
  if (do_pin) {
    num_pinned_ += newly_pinned;
    num_pins_ += n;
  }
}

void SlotIndex::commit_all(const uint32_t* slots, uint32_t n) {
  SlotState* states = states_.data();
  uint64_t unpinned = 0;
  for (uint32_t u = 0; u < n; ++u) {
    prefetch_for_write(&states[slots[std::min<size_t>(u + kAhead, n - 1)]]);
    SlotState state = states[slots[u]];
    state.dirty = 1;
    state.pins -= 1;
    unpinned += state.pins == 0;
    states[slots[u]] = state;
  }
  num_pinned_ -= unpinned;
  num_pins_ -= n;
}

void SlotIndex::compact() {
  size_t to = 0;
  for (size_t i = begin_; i < end_; ++i) {
    if (i + kAhead < end_) prefetch(&states_[uses_[i + kAhead].slot]);
    const SlotUse use = uses_[i];
    uses_[to] = use;
    to += is_valid(use);
  }
  begin_ = 0;
  end_ = to;
}

bool SlotIndex::choose_victims(uint64_t n, std::vector<SlotUse>& victims) {
  // Former victims and freed slots left stale entries at the front: go past them for good.
  while (begin_ < end_ && !is_valid(uses_[begin_])) ++begin_;
  for (size_t i = begin_; n > 0 && i < end_; ++i) {
    if (i + kAhead < end_) prefetch(&states_[uses_[i + kAhead].slot]);
    const SlotUse use = uses_[i];
    if (!is_valid(use) || states_[use.slot].pins != 0) continue;
    victims.push_back(use);
    --n;
  }
  return n == 0;
}

void SlotIndex::restore_uses(const std::vector<SlotUse>& uses) {
  // Before last_use is set, so that the queue holds no second entry of these slots.
  compact();
  for (const SlotUse& use : uses) {
    states_[use.slot].last_use = use.plan;
    uses_[end_++] = use;
  }
  std::sort(uses_.data(), uses_.data() + end_, [](const SlotUse& a, const SlotUse& b) {
    return a.plan != b.plan ? a.plan < b.plan : a.order < b.order;
  });
}

void SlotIndex::check() const {
  std::vector<uint32_t> valid(num_slots_, 0);
  for (size_t i = begin_; i < end_; ++i) valid[uses_[i].slot] += is_valid(uses_[i]);
  uint64_t in_use = 0;
  uint64_t pins = 0;
  uint64_t pinned = 0;
  for (uint32_t slot = 0; slot < num_slots_; ++slot) {
    const bool is_used = rows_[slot] != kNoRow;
    if (is_used != (states_[slot].last_use != 0)) throw std::logic_error("slot index: free slot with a last use");
    if (valid[slot] != static_cast<uint32_t>(is_used)) throw std::logic_error("slot index: uses are wrong");
    if (!is_used && (states_[slot].pins != 0 || states_[slot].dirty)) throw std::logic_error("slot index: free slot");
    in_use += is_used;
    pins += states_[slot].pins;
    pinned += states_[slot].pins != 0;
  }
  if (in_use != num_in_use() || pins != num_pins_ || pinned != num_pinned_) {
    throw std::logic_error("slot index: totals are wrong");
  }
}

}  // namespace hybridrec
