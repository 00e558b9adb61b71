// Devices, streams, events, generators and pinned memory, as torch asks for them.
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>

namespace simulated {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, static_cast<c10::DeviceIndex>(device)), id);
}

std::string number(int64_t value) {
  return std::to_string(value);
}

struct Event {
  int64_t stream = 0;
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kDevice, static_cast<c10::DeviceIndex>(current_device));
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "there is no simulated device ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index() < 0 ? current_device : device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.index() < 0 ? current_device : device.index();
    return stream_of(index, devices[index].current_stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index() < 0 ? current_device : device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    std::lock_guard guard(lock);
    const int index = device.index() < 0 ? current_device : device.index();
    const int64_t id = devices[index].streams++;
    devices[index].seen[id];
    return stream_of(index, id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(
        stream.device_index(), std::exchange(devices[stream.device_index()].current_stream, stream.id()));
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard guard(lock);
    if (*event == nullptr) {
      *event = new Event();
    }
    auto* each = static_cast<Event*>(*event);
    each->stream = stream.id();
    each->clock = devices[stream.device_index()].seen[stream.id()];
    each->time = std::chrono::steady_clock::now();
    say("record " + number(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard guard(lock);
    if (event == nullptr) {
      return;
    }
    auto& seen = devices[stream.device_index()].seen[stream.id()];
    for (auto [other, count] : static_cast<Event*>(event)->clock) {
      seen[other] = std::max(seen[other], count);
    }
    say("wait " + number(stream.id()) + " for " + number(static_cast<Event*>(event)->stream));
  }
  bool queryEvent(void*) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return is_available ? kDevices : 0;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard guard(lock);
    synchronize(
        stream.device_index(), stream.id(), devices[stream.device_index()].seen[stream.id()][stream.id()]);
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard guard(lock);
    if (event != nullptr) {
      auto* each = static_cast<Event*>(event);
      synchronize(current_device, each->stream, each->clock[each->stream]);
    }
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    std::lock_guard guard(lock);
    auto seen = devices[index].seen;
    for (auto& [stream, clock] : seen) {
      synchronize(index, stream, clock[stream]);
    }
    say("synchronize device " + number(index));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator()->recordStream(data, stream);
  }
  double elapsedTime(void* start, void* end, c10::DeviceIndex) const override {
    const auto between = static_cast<Event*>(end)->time - static_cast<Event*>(start)->time;
    return std::chrono::duration<double, std::milli>(between).count();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) {
    device_ = c10::Device(kDevice, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

const at::Generator& default_generator(int index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int each = 0; each < kDevices; each++) {
      made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(each)));
    }
    return made;
  }();
  return generators[index < 0 ? current_device : index];
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return is_available;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? static_cast<c10::DeviceIndex>(current_device) : index);
  }
  at::Device getDeviceFromPtr(void* data) const override {
    Block* block = block_of(data);
    return at::Device(kDevice, static_cast<c10::DeviceIndex>(block == nullptr ? 0 : block->device));
  }
  bool isPinnedPtr(const void* data) const override {
    Block* block = block_of(data);
    return block != nullptr && block->device < 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return is_available ? kDevices : 0;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    current_device = device;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current_device, device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::Storage kept = storage;
    const int before = std::exchange(current_device, kept.device().index());
    c10::DataPtr data = device_allocator()->allocate(bytes);
    current_device = before;
    if (kept.data() != nullptr && data.get() != nullptr) {
      std::memcpy(data.get(), kept.data(), std::min(bytes, kept.nbytes()));
    }
    kept.set_data_ptr_noswap(std::move(data));
    kept.set_nbytes(bytes);
  }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

TORCH_LIBRARY(simulated, library) {
  library.def("rng_state(int device) -> Tensor", [](int64_t device) -> at::Tensor {
    return at::Tensor(default_generator(int(device)).unsafeGetGeneratorImpl()->get_state());
  });
  library.def("set_rng_state(Tensor state, int device) -> ()", [](const at::Tensor& state, int64_t device) {
    default_generator(int(device)).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
  library.def("seed(int seed, int device) -> ()", [](int64_t seed, int64_t device) {
    default_generator(int(device)).unsafeGetGeneratorImpl()->set_current_seed(uint64_t(seed));
  });
  library.def("set_capacity(int bytes, int device) -> ()", [](int64_t bytes, int64_t device) {
    devices[device].capacity_bytes = size_t(bytes);
  });
  library.def("requested_bytes(int device) -> int[]", [](int64_t device) {
    auto& stat = devices[device].stats.requested_bytes[0];
    return std::vector<int64_t>{stat.current, stat.peak};
  });
  library.def("pinned_bytes() -> int", [] { return int64_t(pinned_bytes()); });
  library.def("set_available(bool value) -> ()", [](bool value) { is_available = value; });
  library.def("taken_log() -> str", [] { return taken_log(); });
  library.def("taken_races() -> str", [] { return taken_races(); });
}

}  // namespace
}  // namespace simulated
