#include "memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

namespace simulated {

std::recursive_mutex lock;
Device devices[kDevices];
int current_device = 0;
thread_local int working_on = -1;
bool is_available = true;

namespace {

std::map<const char*, Block> blocks;
std::string log_lines, race_lines;
size_t pinned = 0;

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

size_t rounded(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

void reserve(Device& device, int index, size_t bytes) {
  auto& stats = device.stats;
  const size_t needed = stats.allocated_bytes[kAll].current + bytes;
  if (needed > device.capacity_bytes) {
    stats.num_ooms++;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "simulated out of memory. Tried to allocate ", bytes, " bytes. Device ", index,
        " has a total capacity of ", device.capacity_bytes, " bytes of which ",
        device.capacity_bytes - stats.allocated_bytes[kAll].current, " bytes are free.");
  }
  const size_t segments = std::min(rounded(needed, kSegmentBytes), device.capacity_bytes);
  if (segments > size_t(stats.reserved_bytes[kAll].current)) {
    stats.reserved_bytes[kAll].increase(segments - stats.reserved_bytes[kAll].current);
  }
}

void count(Device& device, const Block& block, bool more) {
  auto& stats = device.stats;
  auto change = [more](auto& stat, size_t amount) { more ? stat[kAll].increase(amount) : stat[kAll].decrease(amount); };
  change(stats.allocated_bytes, block.bytes);
  change(stats.active_bytes, block.bytes);
  change(stats.requested_bytes, block.asked_bytes);
  change(stats.allocation, 1);
  change(stats.active, 1);
}

void report(void* data, int64_t bytes, int index) {
  auto& stats = devices[index].stats;
  c10::reportMemoryUsageToProfiler(
      data, bytes, stats.allocated_bytes[kAll].current, stats.reserved_bytes[kAll].current,
      c10::Device(c10::DeviceType::PrivateUse1, index));
}

// What other streams do with a block must be over, as far as the stream it belongs to knows, or the allocator be told.
void check_free(const Block& block) {
  if (block.device < 0) {
    return;  // pinned memory waits for its copies by itself
  }
  auto& seen = devices[block.device].seen[block.stream];
  for (const Clock& clock : {block.written, block.read}) {
    for (auto [stream, when] : clock) {
      if (stream != block.stream && seen[stream] < when && !block.recorded.count(stream)) {
        race(
            "freed while stream " + std::to_string(stream) + " uses it: " + std::to_string(block.asked_bytes) +
            " bytes");
      }
    }
  }
}

}  // namespace

void say(const std::string& line) {
  std::lock_guard guard(lock);
  log_lines += line + "\n";
}

void race(const std::string& line) {
  std::lock_guard guard(lock);
  race_lines += line + "\n";
}

std::string taken_log() {
  std::lock_guard guard(lock);
  return std::exchange(log_lines, "");
}

std::string taken_races() {
  std::lock_guard guard(lock);
  return std::exchange(race_lines, "");
}

void* allocate(size_t bytes, int device) {
  if (bytes == 0) {
    return nullptr;
  }
  std::lock_guard guard(lock);
  Block block;
  block.asked_bytes = bytes;
  block.bytes = rounded(bytes, kBlockBytes);
  block.device = device;
  if (device >= 0) {
    reserve(devices[device], device, block.bytes);
    block.stream = devices[device].current_stream;
    block.written[block.stream] = devices[device].seen[block.stream][block.stream];
  }
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, block.bytes) == 0, "the host of the simulated device is out of memory");
  if (device >= 0) {
    count(devices[device], block, true);
    report(data, int64_t(block.bytes), device);
  } else {
    pinned += block.bytes;
  }
  blocks[static_cast<const char*>(data)] = block;
  return data;
}

bool release(void* data) {
  std::lock_guard guard(lock);
  auto found = blocks.find(static_cast<const char*>(data));
  if (found == blocks.end()) {
    return false;
  }
  check_free(found->second);
  const Block block = found->second;
  blocks.erase(found);
  if (block.device >= 0) {
    count(devices[block.device], block, false);
    report(data, -int64_t(block.bytes), block.device);
  } else {
    pinned -= block.bytes;
  }
  std::memset(data, 0xAB, std::min<size_t>(block.bytes, 4096));  // who reads it nevertheless sees no old numbers
  std::free(data);
  return true;
}

Block* block_of(const void* data) {
  std::lock_guard guard(lock);
  auto next = blocks.upper_bound(static_cast<const char*>(data));
  if (data == nullptr || next == blocks.begin()) {
    return nullptr;
  }
  auto& [start, block] = *std::prev(next);
  return static_cast<const char*>(data) < start + block.bytes ? &block : nullptr;
}

size_t pinned_bytes() {
  return pinned;
}

uint64_t begin_work(int device, int64_t stream) {
  std::lock_guard guard(lock);
  return ++devices[device].seen[stream][stream];
}

void touch(const void* data, int device, int64_t stream, bool writes) {
  std::lock_guard guard(lock);
  Block* block = block_of(data);
  if (block == nullptr) {
    return;
  }
  auto& seen = devices[device].seen[stream];
  auto check = [&](const Clock& clock) {
    for (auto [other, when] : clock) {
      if (other != stream && seen[other] < when) {
        race(
            std::string(writes ? "a write" : "a read") + " on stream " + std::to_string(stream) +
            " did not wait for stream " + std::to_string(other) + ": " + std::to_string(block->asked_bytes) + " bytes");
      }
    }
  };
  check(block->written);
  if (writes) {
    check(block->read);
  }
  (writes ? block->written : block->read)[stream] = seen[stream];
}

void synchronize(int device, int64_t stream, uint64_t count) {
  std::lock_guard guard(lock);
  for (auto& [each, seen] : devices[device].seen) {  // the host asks for all that follows, so it follows
    seen[stream] = std::max(seen[stream], count);
  }
}

namespace {

void free_device(void* data) {
  release(data);
}

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = simulated::allocate(bytes, current_device);
    return {data, data, &free_device, c10::Device(c10::DeviceType::PrivateUse1, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard guard(lock);
    for (auto& device : devices) {
      auto& reserved = device.stats.reserved_bytes[kAll];
      reserved.decrease(reserved.current - rounded(device.stats.allocated_bytes[kAll].current, kSegmentBytes));
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard guard(lock);
    if (Block* block = block_of(data.get())) {
      block->recorded.insert(stream.id());
      say("record_stream " + std::to_string(stream.id()));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return devices[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    auto& stats = devices[device].stats;
    for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.requested_bytes, &stats.active_bytes}) {
      (*stat)[kAll].reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto& each = devices[device];
    return {each.capacity_bytes - each.stats.reserved_bytes[kAll].current, each.capacity_bytes};
  }
};

class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = simulated::allocate(bytes, -1);
    return {data, data, &free_device, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

void free_any(void* data) {
  if (!release(data)) {
    c10::GetDefaultCPUAllocator()->raw_deleter()(data);
  }
}

// What the CPU's kernels allocate while they run for the device is memory of the device.
class HostMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (working_on < 0) {
      return c10::GetDefaultCPUAllocator()->allocate(bytes);
    }
    void* data = simulated::allocate(bytes, working_on);
    return {data, data, &free_any, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_any;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
HostMemory host_memory;
const bool installed = [] {
  c10::SetCPUAllocator(&host_memory, 100);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_memory);
  return true;
}();

}  // namespace

c10::DeviceAllocator* device_allocator() {
  return &device_memory;
}

c10::Allocator* pinned_allocator() {
  return &pinned_memory;
}

}  // namespace simulated
