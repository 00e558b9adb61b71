// Memory, streams and their clocks of a simulated accelerator. Host memory stands for that of the device.
//
// Note [Clocks]
//   Work runs at once and in the order in which it is asked for. What a real device could do in another order is found by
//   clocks: every stream counts its work, and knows up to which count of other streams it has waited. A block remembers
//   which work of which stream wrote and read it last. Who reads without having waited for the writers, or writes or frees
//   without having waited for all, is in a race, and that is written down.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulated {

constexpr int kDevices = 2;
constexpr size_t kBlockBytes = 512;        // every allocation is rounded up to this
constexpr size_t kSegmentBytes = 2 << 20;  // and what is reserved to this

using Clock = std::map<int64_t, uint64_t>;  // by stream: how much of its work

struct Block {
  size_t asked_bytes = 0;
  size_t bytes = 0;
  int device = 0;  // -1: pinned memory of the host
  int64_t stream = 0;  // that it was allocated on
  Clock written, read;
  std::set<int64_t> recorded;  // streams that it must outlive
};

struct Device {
  size_t capacity_bytes = size_t(1) << 30;
  c10::CachingDeviceAllocator::DeviceStats stats;
  int64_t current_stream = 0;
  int64_t streams = 1;
  std::map<int64_t, Clock> seen;  // by stream: what of the others it has waited for, and its own count
};

extern std::recursive_mutex lock;
extern Device devices[kDevices];
extern int current_device;
extern thread_local int working_on;  // the device whose operator runs on this thread, -1: none
extern bool is_available;

void say(const std::string& line);
void race(const std::string& line);
std::string taken_log();
std::string taken_races();

void* allocate(size_t bytes, int device);  // -1: pinned memory
bool release(void* data);                  // false: not ours
Block* block_of(const void* data);         // also in its middle; nullptr: not ours
size_t pinned_bytes();

uint64_t begin_work(int device, int64_t stream);  // one more piece of work of a stream
void touch(const void* data, int device, int64_t stream, bool writes);
void synchronize(int device, int64_t stream, uint64_t count);  // the host waits
c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

}  // namespace simulated
