// Operators of the simulated device: the CPU's, on the same memory.
//
// Note [On the same memory]
//   Every tensor of the device is shown to the CPU's kernel as a tensor of the CPU. What the kernel returns is turned
//   back: one of its arguments into that argument, a view into a view, new memory into memory of the device, for which
//   it is counted already (`HostMemory`).
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <unordered_map>

namespace simulated {
namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
const c10::DispatchKeySet kCpuKeys(c10::DispatchKey::CPU);

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// One call of an operator: its arguments as the CPU's, and its results as the device's.
class Call {
 public:
  explicit Call(int device) : device_(device), before_(working_on), stream_(devices[device].current_stream) {
    working_on = device;
    begin_work(device, stream_);
  }
  ~Call() {
    working_on = before_;
  }

  at::Tensor to_cpu(const at::Tensor& tensor, bool writes = false) {
    if (!is_ours(tensor)) {
      return tensor;
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    auto known = shown_.find(impl);
    if (known != shown_.end()) {
      return known->second;
    }
    touch(tensor.storage().data(), device_, stream_, writes);
    at::Tensor cpu = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage_of(tensor.storage())), kCpuKeys, tensor.dtype());
    cpu.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    shown_.emplace(impl, cpu);
    originals_.emplace(cpu.unsafeGetTensorImpl(), tensor);
    return cpu;
  }

  at::Tensor to_device(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CPU) {
      return tensor;
    }
    auto original = originals_.find(tensor.unsafeGetTensorImpl());
    if (original != originals_.end()) {
      return original->second;
    }
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(owned(tensor.storage()), kKeys, tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return made;
  }

  // Arguments may have been resized, or given another shape in place.
  void finish() {
    for (auto& [device_storage, cpu] : storages_) {
      if (cpu.data() != device_storage->data() || cpu.nbytes() != device_storage->nbytes()) {
        c10::DataPtr data = cpu.set_data_ptr(c10::DataPtr());
        data.unsafe_set_device(device());
        device_storage->set_nbytes(cpu.nbytes());
        device_storage->set_data_ptr_noswap(std::move(data));
      }
    }
    for (auto& [cpu, tensor] : originals_) {
      if (cpu->sizes() != tensor.sizes() || cpu->strides() != tensor.strides()) {
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(cpu->sizes(), cpu->strides(), cpu->storage_offset());
      }
    }
  }

  c10::Device device() const {
    return c10::Device(kDevice, static_cast<c10::DeviceIndex>(device_));
  }

 private:
  const c10::Storage& storage_of(const c10::Storage& storage) {
    auto* impl = storage.unsafeGetStorageImpl();
    auto known = storages_.find(impl);
    if (known == storages_.end()) {
      c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::DeviceType::CPU));
      c10::Storage cpu(
          c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetAllocator(c10::DeviceType::CPU),
          true);
      devices_.emplace(cpu.unsafeGetStorageImpl(), storage);
      known = storages_.emplace(impl, cpu).first;
    }
    return known->second;
  }

  c10::Storage owned(const c10::Storage& cpu) {
    auto known = devices_.find(cpu.unsafeGetStorageImpl());
    if (known == devices_.end()) {
      kept_.push_back(cpu);
      const size_t bytes = cpu.nbytes();
      c10::Storage own = cpu;
      c10::DataPtr data = own.set_data_ptr(c10::DataPtr());
      touch(data.get(), device_, stream_, true);
      data.unsafe_set_device(device());
      c10::Storage made(c10::Storage::use_byte_size_t(), bytes, std::move(data), device_allocator(), true);
      known = devices_.emplace(cpu.unsafeGetStorageImpl(), made).first;
    }
    return known->second;
  }

  int device_, before_;
  int64_t stream_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> shown_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // of the device: as the CPU sees it
  std::unordered_map<c10::StorageImpl*, c10::Storage> devices_;   // of the CPU: the device's
  std::vector<c10::Storage> kept_;
};

// The device's generator in the place of the CPU's, for as long as an operator runs.
class Draws {
 public:
  explicit Draws(const at::Generator& ours) : ours_(ours), cpu_(at::detail::getDefaultCPUGenerator()) {
    const int device = std::exchange(working_on, -1);  // states are in the memory of the host
    before_ = cpu_.get_state();
    cpu_.set_state(ours_.get_state());
    working_on = device;
  }
  ~Draws() {
    const int device = std::exchange(working_on, -1);
    ours_.set_state(cpu_.get_state());
    cpu_.set_state(before_);
    working_on = device;
  }

 private:
  at::Generator ours_, cpu_;
  at::Tensor before_;
};

int device_of(const std::vector<c10::IValue>& arguments) {
  for (const auto& each : arguments) {
    if (each.isTensor() && is_ours(each.toTensor())) {
      return each.toTensor().device().index();
    }
    if (each.isTensorList()) {
      for (const at::Tensor& tensor : each.toTensorVector()) {
        if (is_ours(tensor)) {
          return tensor.device().index();
        }
      }
    }
    if (each.isDevice() && each.toDevice().type() == kDevice && each.toDevice().has_index()) {
      return each.toDevice().index();
    }
  }
  return current_device;
}

c10::IValue shown(Call& call, const c10::IValue& value, bool writes) {
  if (value.isTensor()) {
    return call.to_cpu(value.toTensor(), writes);
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = call.to_cpu(tensor, writes);
    }
    return c10::IValue(c10::List<at::Tensor>(tensors));
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> each : value.toOptionalTensorList()) {
      list.push_back(each.has_value() ? std::optional(call.to_cpu(*each)) : std::nullopt);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == kDevice) {
    return c10::Device(c10::DeviceType::CPU);
  }
  return value;
}

c10::IValue turned_back(Call& call, const c10::IValue& value) {
  if (value.isTensor()) {
    return call.to_device(value.toTensor());
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors = value.toTensorVector();
    for (auto& tensor : tensors) {
      tensor = call.to_device(tensor);
    }
    return c10::IValue(c10::List<at::Tensor>(tensors));
  }
  return value;
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  std::vector<c10::IValue> arguments(stack->end() - int64_t(count), stack->end());
  stack->erase(stack->end() - int64_t(count), stack->end());
  const int device = device_of(arguments);
  Call call(device);
  at::Generator generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(static_cast<c10::DeviceIndex>(device));
  for (size_t place = 0; place < count; place++) {
    const auto& each = arguments[place];
    const auto* alias = op.schema().arguments()[place].alias_info();
    if (each.isGenerator() && each.toGenerator().device().type() == kDevice) {
      generator = each.toGenerator();
      stack->emplace_back(at::detail::getDefaultCPUGenerator());
    } else {
      stack->push_back(shown(call, each, alias != nullptr && alias->isWrite()));
    }
  }
  arguments.clear();
  {
    std::optional<Draws> draws;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      draws.emplace(generator);
    }
    op.redispatchBoxed(kCpuKeys, stack);
  }
  for (auto& each : *stack) {
    each = turned_back(call, each);
  }
  call.finish();
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const int before = current_device;
  current_device = device.has_value() && device->has_index() ? device->index() : before;
  struct Back {
    int device;
    ~Back() {
      current_device = device;
    }
  } back{before};
  return at::detail::empty_generic(size, device_allocator(), kKeys, at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const int before = current_device;
  current_device = device.has_value() && device->has_index() ? device->index() : before;
  struct Back {
    int device;
    ~Back() {
      current_device = device;
    }
  } back{before};
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, at::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = is_ours(from) ? from.device().index() : to.device().index();
  const int64_t stream = devices[device].current_stream;
  {
    Call call(device);
    const at::Tensor target = call.to_cpu(to, true), source = call.to_cpu(from);
    for (const at::Tensor& each : {from, to}) {
      if (!is_ours(each)) {
        touch(each.storage().data(), device, stream, each.is_same(to));  // pinned memory
      }
    }
    if (target.sizes() == source.sizes() || source.numel() > 0) {
      const_cast<at::Tensor&>(target).copy_(source);
    }
  }
  if (is_ours(from) != is_ours(to)) {
    const at::Tensor& host = is_ours(from) ? to : from;
    const bool overlaps = non_blocking && host.is_pinned();
    say(std::string(is_ours(from) ? "to host " : "to device ") + std::to_string(from.nbytes()) + " on " +
        std::to_string(stream) + (overlaps ? "" : ", the host waits"));
    if (!overlaps) {
      synchronize(device, stream, devices[device].seen[stream][stream]);
    }
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  const_cast<at::Tensor&>(to).resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(at::Tensor& tensor, at::Stream stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
    int64_t groups) {
  Call call(input.device().index());
  std::optional<at::Tensor> own = bias.has_value() ? std::optional(call.to_cpu(*bias)) : std::nullopt;
  return call.to_device(at::convolution(
      call.to_cpu(input), call.to_cpu(weight), own, stride, padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  Call call(input.device().index());
  const std::vector<int64_t> bias_size = {gradient.size(1)};
  auto [one, two, three] = at::convolution_backward(
      call.to_cpu(gradient), call.to_cpu(input), call.to_cpu(weight), bias_size, stride, padding, dilation, transposed,
      output_padding, groups, wanted);
  return {call.to_device(one), call.to_device(two), call.to_device(three)};
}

// As cuDNN's: it writes the running statistics, and its schema does not say so.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> cudnn_batch_norm(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum,
    double eps) {
  Call call(input.device().index());
  auto own = [&](const std::optional<at::Tensor>& each) {
    return each.has_value() ? std::optional(call.to_cpu(*each)) : std::nullopt;
  };
  auto [output, saved_mean, saved_deviation] = at::native_batch_norm(
      call.to_cpu(input), call.to_cpu(weight), own(bias), own(mean), own(variance), training, momentum, eps);
  at::Tensor reserve = at::detail::empty_generic({0}, device_allocator(), kKeys, at::kByte, std::nullopt);
  return {call.to_device(output), call.to_device(saved_mean), call.to_device(saved_deviation), reserve};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> cudnn_batch_norm_backward(
    const at::Tensor& input, const at::Tensor& gradient, const at::Tensor& weight,
    const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance,
    const std::optional<at::Tensor>& saved_mean, const std::optional<at::Tensor>& saved_deviation, double eps,
    const at::Tensor& reserve) {
  TORCH_CHECK(reserve.dim() == 1 && reserve.scalar_type() == at::kByte, "the reserve of cuDNN is its own");
  Call call(input.device().index());
  auto own = [&](const std::optional<at::Tensor>& each) {
    return each.has_value() ? std::optional(call.to_cpu(*each)) : std::nullopt;
  };
  auto [one, two, three] = at::native_batch_norm_backward(
      call.to_cpu(gradient), call.to_cpu(input), call.to_cpu(weight), own(mean), own(variance), own(saved_mean),
      own(saved_deviation), true, eps, {true, true, true});
  return {call.to_device(one), call.to_device(two), call.to_device(three)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Storage", &at::native::set_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("record_stream", &record_stream);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("cudnn_batch_norm", &cudnn_batch_norm);
  library.impl("cudnn_batch_norm_backward", &cudnn_batch_norm_backward);
}

}  // namespace
}  // namespace simulated
