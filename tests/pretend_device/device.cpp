// A second device without hardware, for tests: PyTorch's PrivateUse1 backend over host memory.
//
// Tensors of the device have their own storages, autograd and random state. Every operator runs on the CPU, on tensors that
// share the storages. Operators refuse tensors of two devices where CUDA refuses them. Launches, waits of the host, copies and
// memory are counted. An operator can be made to fail, and allocations can be limited.
//
// The arithmetic is the CPU's; kernels are never asynchronous; only device 0 exists.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;
using c10::Stream;
using torch::jit::Stack;

const Device DEVICE(DeviceType::PrivateUse1, 0);

// --- counts, limits and planted failures -----------------------------------------------------------------------------------

std::mutex mutex;
std::map<std::string, int64_t> counts;  // guarded by `mutex`
std::atomic<bool> counting{false}, float64{true}, available{false};
std::atomic<int64_t> live{0}, peak{0}, limit{INT64_MAX};

struct Failure {
  std::string operator_name, message, kind;
  int64_t calls_before;
  bool sticky, raised;
};
std::vector<Failure> failures;  // guarded by `mutex`

void count(const std::string& name, int64_t by = 1) {
  if (!counting) return;
  std::lock_guard<std::mutex> guard(mutex);
  counts[name] += by;
}

void fail_if_planted(const std::string& name) {
  std::unique_lock<std::mutex> guard(mutex);
  for (auto& failure : failures) {
    if (!(failure.raised && failure.sticky) && (failure.raised || failure.operator_name != name || failure.calls_before-- > 0)) continue;
    failure.raised = true;
    auto [message, kind] = std::pair(failure.message, failure.kind);
    guard.unlock();
    c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
    if (kind == "accelerator") throw c10::AcceleratorError(here, 719, message);
    if (kind == "out_of_memory") throw c10::OutOfMemoryError(here, message);
    throw c10::Error(here, message);
  }
}

// --- memory ----------------------------------------------------------------------------------------------------------------

// Storage of the CPU that belongs to a tensor of the device.
struct Adopted {
  at::Storage host;
  int64_t bytes;
};

void release(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  live -= adopted->bytes;
  delete adopted;
}

c10::DataPtr adopt(at::Storage host) {
  auto bytes = static_cast<int64_t>(host.nbytes());
  int64_t now = (live += bytes), before = peak;
  if (now > limit) {
    live -= bytes;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "pretend out of memory. Tried to allocate ", bytes, " bytes, ", now - bytes, " of ", limit.load(), " in use.");
  }
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
  void* data = host.mutable_data();
  return {data, new Adopted{std::move(host), bytes}, &release, DEVICE};
}

at::Storage host_storage(size_t bytes) {
  return at::Storage(at::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator()->allocate(bytes), c10::GetCPUAllocator(), true);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return adopt(host_storage(bytes)); }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
DeviceAllocator allocator;
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &allocator);

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  auto memory = allocator.allocate(bytes);
  if (storage->nbytes() && bytes) std::memcpy(memory.get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr(std::move(memory));
  storage->set_nbytes(bytes);
}

std::set<const void*> pinned;  // guarded by `mutex`

void unpin(void* data) {
  {
    std::lock_guard<std::mutex> guard(mutex);
    pinned.erase(data);
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, bytes + 64) == 0, "no memory to pin");
    std::lock_guard<std::mutex> guard(mutex);
    pinned.insert(data);
    return {data, data, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(mutex);
  return pinned.count(data) > 0;
}

// --- random state ----------------------------------------------------------------------------------------------------------

// A generator of the device: a CPU generator that CPU tensors refuse.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator host)
      : c10::GeneratorImpl(DEVICE, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(host.clone()); }
  at::Generator host;
};

at::Generator new_generator() {
  return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
}

const at::Generator& default_generator() {
  static at::Generator generator = new_generator();
  return generator;
}

// --- the device's registration ---------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, DEVICE); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { count("syncs"); }
  void synchronizeEvent(void*) const override { count("syncs"); }
  void synchronizeDevice(const DeviceIndex) const override { count("syncs"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return available; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return available ? 1 : 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return new_generator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return DEVICE; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage.unsafeGetStorageImpl(), bytes); }
};

// --- operators -------------------------------------------------------------------------------------------------------------

bool on_device(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == DeviceType::PrivateUse1;
}

void delete_storage(void* context) {
  delete static_cast<at::Storage*>(context);
}

// A CPU tensor over the memory of a tensor of the device.
Tensor on_host(const Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  const at::Storage& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), new at::Storage(storage), &delete_storage, Device(DeviceType::CPU));
  at::Storage shared(at::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// A tensor of the device that holds an operator's result: a view of an argument, or memory of its own.
Tensor on_pretend(const Tensor& result, const std::vector<Tensor>& arguments) {
  if (!result.defined() || on_device(result)) return result;
  at::Storage storage;
  for (const auto& argument : arguments)
    if (on_device(argument) && argument.storage().data() && argument.storage().data() == result.storage().data()) storage = argument.storage();
  if (!storage) storage = at::Storage(at::Storage::use_byte_size_t(), result.storage().nbytes(), adopt(result.storage()), &allocator, true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
  if (result.is_conj()) tensor._set_conj(true);
  if (result.is_neg()) tensor._set_neg(true);
  return tensor;
}

// Give an argument that an operator wrote to the sizes and the memory that the operator left.
void update(const Tensor& argument, const Tensor& host) {
  if (host.storage().data() != argument.storage().data()) {
    auto* storage = argument.storage().unsafeGetStorageImpl();
    storage->set_data_ptr(adopt(host.storage()));
    storage->set_nbytes(host.storage().nbytes());
  }
  argument.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
}

void each_tensor(const IValue& value, const std::function<void(const Tensor&)>& visit) {
  if (value.isTensor()) visit(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& tensor : value.toTensorVector()) visit(tensor);
  if (value.isOptionalTensorList())
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) visit(*tensor);
}

IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return changed;
  }
  return value;
}

// Operators whose indices may lie on the CPU, on CUDA as well; boolean ones make the host wait for their number of entries.
const std::set<std::string> INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
// Operators that make the host wait on CUDA, for a value, a size or a convergence flag.
const std::set<std::string> WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave", "aten::_linalg_svd", "aten::bincount"};

void require_one_device(const std::string& name, const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  for (size_t i = 0; i < arguments.size(); i++) {
    bool list = arguments[i].isTensorList();
    each_tensor(arguments[i], [&](const Tensor& tensor) {
      if (!tensor.defined() || !tensor.device().is_cpu()) return;
      if (tensor.dim() == 0 && !list) return;  // a number
      if (INDEXING.count(name) && schema.arguments()[i].name() == "indices") {
        count("to_device"), count("bytes_to_device", tensor.nbytes()), count("syncs");
        return;
      }
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, pretend:0 and cpu! (when checking argument ", schema.arguments()[i].name(), " of ", name, ")");
    });
  }
}

// Run an operator on the CPU, on aliases of its tensors.
void run(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  auto arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  torch::jit::drop(*stack, arguments.size());
  std::vector<Tensor> tensors;
  bool device = false;
  for (const auto& argument : arguments) {
    each_tensor(argument, [&](const Tensor& tensor) { tensors.push_back(tensor), device |= on_device(tensor); });
    device |= argument.isDevice() && argument.toDevice().type() == DeviceType::PrivateUse1;
  }
  if (device) {
    fail_if_planted(name);
    require_one_device(name, schema, arguments);
    count(name);
    if (name != "aten::_local_scalar_dense") count("launches");
    if (WAITING.count(name)) count("syncs");
  }
  std::vector<IValue> lowered;
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue value = map_tensors(arguments[i], on_host);
    if (device && schema.arguments()[i].name() == "generator") {
      at::Generator generator = value.isNone() ? default_generator() : value.toGenerator();
      TORCH_CHECK(generator.device().type() == DeviceType::PrivateUse1, "Expected a 'pretend' device type for generator but found '", generator.device(), "'");
      value = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
    }
    if (value.isDevice() && value.toDevice().type() == DeviceType::PrivateUse1) value = Device(DeviceType::CPU);
    lowered.push_back(value);
    stack->push_back(value);
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  if (!device) return;
  auto results = torch::jit::last(*stack, schema.returns().size()).vec();
  torch::jit::drop(*stack, results.size());
  for (size_t i = 0; i < arguments.size(); i++) {
    auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite() && arguments[i].isTensor() && on_device(arguments[i].toTensor())) update(arguments[i].toTensor(), lowered[i].toTensor());
  }
  for (size_t r = 0; r < results.size(); r++) {
    auto* alias = schema.returns()[r].alias_info();
    IValue result;
    for (size_t i = 0; alias && alias->isWrite() && i < arguments.size(); i++)
      if (schema.arguments()[i].alias_info() && *schema.arguments()[i].alias_info() == *alias) result = arguments[i];
    stack->push_back(result.isNone() ? map_tensors(results[r], [&](const Tensor& tensor) { return on_pretend(tensor, tensors); }) : result);
  }
}

void require_supported(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(float64 || dtype != at::kDouble, "Cannot convert a pretend Tensor to float64 dtype as the pretend framework doesn't support float64. Please use float32 instead.");
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  require_supported(at::dtype_or_default(dtype));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

// Forward-mode differentiation makes tensors of zeros without memory.
Tensor zeros_without_memory(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  static at::native::ZeroTensorAllocator allocator(DEVICE);
  c10::DispatchKeySet keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &allocator, keys, dtype.value_or(at::kFloat), std::nullopt);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  require_supported(at::dtype_or_default(dtype));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

// Views keep the tensor's storage; natively, since a view of an empty tensor cannot be told from a copy by its address.
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

// A copy between devices waits unless it is asked not to and the memory of the host is pinned; the source's device converts.
Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  fail_if_planted("aten::copy_");
  bool to_device = !on_device(self), to_host = !on_device(target);
  const Tensor& host = to_device ? self : target;
  if (to_device || to_host) {
    count(to_device ? "to_device" : "to_host");
    count(to_device ? "bytes_to_device" : "bytes_to_host", target.nbytes());
    if (!non_blocking || (to_host && !is_pinned(host.storage().data()))) count("syncs");
  } else {
    count("aten::copy_"), count("launches");
  }
  on_host(target).copy_(on_host(self));
  return target;
}

// All streams are one, in order with the host, so that no memory is reused too early.
void record_stream(Tensor&, Stream) {}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  auto size = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef({c10::SymInt(size)}), c10::SymIntArrayRef({c10::SymInt(1)}));
}

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  TORCH_CHECK(on_device(x) && on_device(weight) && (!bias || !bias->defined() || on_device(*bias)), "Input type and weight type should be the same: a convolution's tensors lie on two devices");
  fail_if_planted("aten::convolution"), count("aten::convolution"), count("launches");
  auto host_bias = bias && bias->defined() ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
  return on_pretend(at::convolution_symint(on_host(x), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups), {});
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  count("aten::convolution_backward"), count("launches");
  auto [dx, dweight, dbias] = at::convolution_backward_symint(on_host(gradient), on_host(x), on_host(weight), c10::SymIntArrayRef({weight.sym_size(transposed ? 1 : 0)}), stride, padding, dilation, transposed, output_padding, groups, mask);
  return {on_pretend(dx, {}), on_pretend(dweight, {}), on_pretend(dbias, {})};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zeros_without_memory);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("_copy_from", copy_from);
  m.impl("record_stream", record_stream);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("_fused_sdp_choice", math_attention);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SOFTMAX(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SOFTMAX)
}

// --- the interface of tests/pretend_device/__init__.py ---------------------------------------------------------------------

TORCH_LIBRARY(pretend, m) {
  m.def("register_hooks() -> ()", [] { static Hooks hooks; at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("set_available(bool value) -> ()", [](bool value) { available = value; });
  m.def("is_available() -> bool", [] { return available.load(); });
  m.def("synchronize() -> ()", [] { count("syncs"); });
  m.def("set_float64(bool value) -> ()", [](bool value) { float64 = value; });
  m.def("set_limit(int bytes) -> ()", [](int64_t bytes) { limit = bytes; });
  m.def("get_rng_state() -> Tensor", [] { return default_generator().get_state(); });
  m.def("set_rng_state(Tensor state) -> ()", [](const Tensor& state) {
    at::Generator generator = default_generator();
    generator.set_state(state);
  });
  m.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    at::Generator generator = default_generator();
    generator.set_current_seed(static_cast<uint64_t>(seed));
  });
  m.def("limit() -> int", [] { return limit.load(); });
  m.def("live_bytes() -> int", [] { return live.load(); });
  m.def("peak_bytes() -> int", [] { return peak.load(); });
  m.def("reset_peak() -> ()", [] { peak = live.load(); });
  m.def("start_counting() -> ()", [] {
    std::lock_guard<std::mutex> guard(mutex);
    counts.clear();
    counting = true;
  });
  m.def("stop_counting() -> Dict(str, int)", [] {
    counting = false;
    std::lock_guard<std::mutex> guard(mutex);
    c10::Dict<std::string, int64_t> result;
    for (const auto& [name, number] : counts) result.insert(name, number);
    return result;
  });
  m.def("plant_failure(str name, int calls_before, str message, str kind, bool sticky) -> ()", [](std::string name, int64_t calls_before, std::string message, std::string kind, bool sticky) {
    std::lock_guard<std::mutex> guard(mutex);
    failures.push_back({name, message, kind, calls_before, sticky, false});
  });
  m.def("remove_failures() -> ()", [] {
    std::lock_guard<std::mutex> guard(mutex);
    failures.clear();
  });
}

}  // namespace
