// Which row is in which slot of the device tier, who pins it, and who goes first.
//
// Least recent use is exact and costs no scan of all slots: `uses_` is a queue of {slot, plan, order}, in order of use;
// every use appends one entry and makes the slot's former entry stale. An entry is valid while the slot's last use is
// that plan (a slot is used once a plan at most). Plans are numbered by the group, and unlike an ordinal, which an undo
// gives back, a number is never used twice: so no stale entry can become valid again. Victims are taken from the front.
// When the queue reaches twice the number of slots the stale entries are dropped: two entries looked at for each one
// appended.
//
// Free slots: freed ones, last freed first, then those never used, lowest first.
//
// Invariants: row_of_slot[s] == kNoRow <=> s is free <=> last_use == 0; a pinned slot is not free; the number of valid
// entries equals the number of slots in use.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "hybridrec/id_map.h"
#include "hybridrec/memory.h"

namespace hybridrec {

inline constexpr uint32_t kNoSlot = 0x7fffffffu;  // bit 31 marks, during a plan, slots that the plan gave out

struct SlotState {
  uint32_t last_use;  // number of the plan that used it last; 0 = free
  uint32_t pins : 31;
  uint32_t dirty : 1;
};

struct SlotUse {
  uint32_t slot;
  uint32_t plan;   // number of the plan
  uint32_t order;  // of use within that plan
};

class SlotIndex {
 public:
  explicit SlotIndex(Budget& budget) : budget_(budget) {}
  SlotIndex(const SlotIndex&) = delete;  // its memory is accounted once
  SlotIndex& operator=(const SlotIndex&) = delete;
  ~SlotIndex() { budget_.give_back(bytes_); }

  uint32_t num_slots() const { return num_slots_; }
  uint64_t num_free() const { return freed_.size() + (num_slots_ - next_unused_); }
  uint64_t num_in_use() const { return num_slots_ - num_free(); }
  uint64_t num_pinned() const { return num_pinned_; }
  uint64_t num_pins() const { return num_pins_; }
  uint64_t bytes() const { return bytes_; }
  // Exact sizes, not reserve()'s: slots are counted once and cost what was promised. The list of freed slots has room
  // for all of them, since freeing must not fail.
  static uint64_t bytes_for(uint32_t num_slots) {
    return uint64_t{num_slots} * (sizeof(SlotState) + 2 * sizeof(uint32_t) + 2 * sizeof(SlotUse));
  }
  SlotState& state(uint32_t slot) { return states_[slot]; }
  const SlotState& state(uint32_t slot) const { return states_[slot]; }
  uint32_t row_of(uint32_t slot) const { return rows_[slot]; }

  // Raises the number of slots. False: the budget refused, nothing changed.
  bool grow(uint32_t num_slots);

  uint32_t take_free() {
    if (freed_.empty()) return next_unused_++;
    const uint32_t slot = freed_.back();
    freed_.pop_back();
    return slot;
  }
  // Puts `row` into a slot that is free or whose row has gone.
  void assign(uint32_t slot, uint32_t row, bool dirty) {
    rows_[slot] = row;
    states_[slot].dirty = dirty;
  }
  void release(uint32_t slot) {
    rows_[slot] = kNoRow;
    states_[slot].last_use = 0;
    states_[slot].dirty = 0;
    freed_.push_back(slot);
  }
  void pin(uint32_t slot) {
    num_pinned_ += states_[slot].pins == 0;
    ++states_[slot].pins;
    ++num_pins_;
  }
  void unpin(uint32_t slot) {
    --states_[slot].pins;
    num_pinned_ -= states_[slot].pins == 0;
    --num_pins_;
  }

  // Pins each of n slots (distinct) if `do_pin`, stamps it and appends its use; its former last use goes to `old_uses`.
  // Room for the uses must be there: reserve_uses().
  void use_all(const uint32_t* slots, uint32_t n, uint32_t plan, bool do_pin, uint32_t* old_uses);
  // Marks n distinct slots dirty and takes one pin from each.
  void commit_all(const uint32_t* slots, uint32_t n);

  // Makes room for n uses; the entries of slots in use survive.
  void reserve_uses(uint32_t n) {
    if (end_ + n > uses_.capacity()) compact();
  }
  void append_use(uint32_t slot, uint32_t plan, uint32_t order) {
    states_[slot].last_use = plan;
    uses_[end_++] = {slot, plan, order};
  }
  // Takes back the newest n uses; the caller restores last_use.
  void drop_uses(uint32_t n) { end_ -= n; }
  // Appends the first n unpinned slots in order of use to `victims`; changes nothing else. False: there are fewer.
  bool choose_victims(uint64_t n, std::vector<SlotUse>& victims);
  // Gives slots that had been victims their former places in the order of use.
  void restore_uses(const std::vector<SlotUse>& uses);
  // Throws std::logic_error if an invariant is broken; for tests.
  void check() const;

 private:
  bool is_valid(const SlotUse& use) const { return states_[use.slot].last_use == use.plan; }
  void compact();

  Budget& budget_;
  uint32_t num_slots_ = 0;
  uint32_t next_unused_ = 0;
  uint64_t num_pinned_ = 0;
  uint64_t num_pins_ = 0;
  uint64_t bytes_ = 0;
  PageArray<SlotState> states_;
  PageArray<uint32_t> rows_;
  PageArray<SlotUse> uses_;  // [begin_, end_)
  size_t begin_ = 0;
  size_t end_ = 0;
  std::vector<uint32_t> freed_;
};

}  // namespace hybridrec
