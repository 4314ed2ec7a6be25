// A CUDA device that is not there: tensors that say cuda:0 and keep their values in CPU memory.
//
// The CPU build of torch knows the dispatch key CUDA and has no kernel for it. Here is a fallback
// for every operator: the arguments' memory is shown to the operator's CPU kernel, and what comes
// out says cuda:0 again. Storages, views, autograd, DDP and the allocator are torch's own, so a
// tensor lives and dies as it would on a GPU. What a GPU does not do is refused: an operator whose
// tensors are on two devices raises.
//
// Everything that streams and memory are about is written to a log, in one order for all threads:
// operators with the blocks of memory they use, allocations, frees, record_stream, events, waits,
// what makes the host wait, and collectives. tests/stand_in/log.py reads it.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <deque>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <unordered_map>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::IValue;

// Before the registrations below, of which torch would warn that some replace its own.
const bool is_logging_ready = (c10::initLogging(), true);

int64_t from_environment(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// A rank has the device of its local rank, as torchrun's ranks have.
const auto kIndex = static_cast<DeviceIndex>(from_environment("LOCAL_RANK", 0));
const auto kNumDevices = static_cast<DeviceIndex>(from_environment("LOCAL_WORLD_SIZE", 1));
const Device kDevice(DeviceType::CUDA, kIndex);

// ---------------------------------------------------------------------------------------- log

enum Kind : int64_t {
  kOperator = 0,
  kAllocate = 1,
  kFree = 2,
  kRecordStream = 3,
  kRecordEvent = 4,
  kWaitEvent = 5,
  kSync = 6,
  kCollective = 7,
  kPageableCopy = 8,
};

struct Entry {
  int64_t kind;
  int64_t stream;
  int64_t thread;
  int64_t place;  // of the Python line, -1 where nobody asked
  int64_t value;  // bytes of an allocation, the longest segment of a kernel
  std::string name;
  std::vector<int64_t> ids;  // blocks, or the event
};

std::mutex log_mutex;
std::deque<Entry> entries;
std::atomic<bool> is_logging{false};
// Asks Python for the line that is running; returns its number.
int64_t (*find_place)() = nullptr;

thread_local int64_t current_stream = 0;

void note(Kind kind, std::string name, int64_t stream, std::vector<int64_t> ids, int64_t value,
          bool has_place) {
  if (!is_logging.load()) return;
  // Before the lock: Python's own lock is taken in there.
  const int64_t place = has_place && find_place ? find_place() : -1;
  const auto thread = static_cast<int64_t>(pthread_self());
  std::lock_guard<std::mutex> guard(log_mutex);
  entries.push_back({kind, stream, thread, place, value, std::move(name), std::move(ids)});
}

void note_sync(const std::string& name, int64_t event = -1) {
  note(kSync, name, current_stream, {event}, 0, true);
}

// ------------------------------------------------------------------------------------- memory

std::atomic<int64_t> next_block{1};
std::atomic<int64_t> allocated_bytes{0};
std::atomic<int64_t> most_allocated_bytes{0};

// A block of "device" memory, and what holds the values.
struct Block {
  int64_t id;
  int64_t bytes;
  int64_t stream;
  c10::DataPtr values;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated_bytes -= block->bytes;
  note(kFree, "", block->stream, {block->id}, block->bytes, false);
  delete block;
}

c10::DataPtr as_block(c10::DataPtr values, size_t bytes) {
  void* data = values.get();
  auto* block = new Block{next_block++, static_cast<int64_t>(bytes), current_stream, std::move(values)};
  const int64_t now = allocated_bytes += block->bytes;
  int64_t most = most_allocated_bytes.load();
  while (now > most && !most_allocated_bytes.compare_exchange_weak(most, now)) {
  }
  note(kAllocate, "", current_stream, {block->id}, block->bytes, true);
  return {data, block, &free_block, kDevice};
}

const Block* block_of(const c10::DataPtr& data) {
  if (data.get_deleter() != &free_block) return nullptr;
  return static_cast<const Block*>(data.get_context());
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return as_block(c10::GetAllocator(DeviceType::CPU)->allocate(bytes), bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
DeviceAllocator device_allocator;

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned;  // begin -> bytes

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.erase(static_cast<const char*>(data));
  }
  std::free(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned[static_cast<const char*>(data)] = std::max<size_t>(bytes, 1);
    return {data, data, &free_pinned, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(data));
  if (after == pinned.begin()) return false;
  auto at = std::prev(after);
  return static_cast<const char*>(data) < at->first + at->second;
}

// ------------------------------------------------------------------------- streams and events

std::atomic<int64_t> next_stream{1};
std::atomic<int64_t> next_event{1};

using Clock = std::map<int64_t, int64_t>;  // by stream, how many of its late copies are over

struct Event {
  int64_t id;
  std::chrono::steady_clock::time_point time;
  Clock clock;
};

// A copy to pinned memory that does not block arrives when the host has waited for it: until then
// the host finds other values there. (On a GPU it may find these, or the old ones, or the new.)
struct LateCopy {
  int64_t stream;
  int64_t number;
  at::Tensor to;
  at::Tensor values;
};

std::mutex late_mutex;
std::deque<LateCopy> late_copies;
Clock num_late;
std::map<int64_t, Clock> seen;  // by stream, what it has waited for

void advance(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) clock[stream] = std::max(clock[stream], number);
}

// With ``late_mutex`` held, as is the next one.
Clock clock_of(int64_t stream) {
  Clock clock = seen[stream];
  clock[stream] = num_late[stream];
  return clock;
}

// The copies that are over; to be destroyed without the mutex, since a tensor's end may wait for
// Python's lock, which another thread may hold while it waits for the mutex.
[[nodiscard]] std::vector<LateCopy> arrive(const Clock& clock) {
  at::AutoDispatchBelowADInplaceOrView guard;
  c10::impl::ExcludeDispatchKeyGuard no_python(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  std::vector<LateCopy> over;
  for (auto at = late_copies.begin(); at != late_copies.end();) {
    const auto known = clock.find(at->stream);
    if (known != clock.end() && known->second >= at->number) {
      at->to.copy_(at->values);
      over.push_back(std::move(*at));
      at = late_copies.erase(at);
    } else {
      ++at;
    }
  }
  return over;
}

void arrive_of_stream(int64_t stream) {
  std::vector<LateCopy> over;
  std::lock_guard<std::mutex> guard(late_mutex);
  over = arrive(clock_of(stream));
}

void arrive_late(int64_t stream, const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor values = at::empty_like(to, to.options().pinned_memory(false));
  values.copy_(from);
  to.fill_(to.is_floating_point() ? at::Scalar(std::nan("")) : at::Scalar(85));
  std::lock_guard<std::mutex> lock(late_mutex);
  late_copies.push_back({stream, ++num_late[stream], to, values});
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kDevice; }
  Device getDevice() const override { return kDevice; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  static c10::Stream stream_of(int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
  }
  c10::Stream getStream(Device) const override { return stream_of(current_stream); }
  c10::Stream getDefaultStream(Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(Device, bool) const override {
    return stream_of(next_stream++);
  }
  c10::Stream getNewStream(Device, int) const override { return stream_of(next_stream++); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int64_t before = current_stream;
    current_stream = stream.id();
    return stream_of(before);
  }
  bool queryStream(const c10::Stream& stream) const override {
    arrive_of_stream(stream.id());
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    arrive_of_stream(stream.id());
    note(kSync, "stream.synchronize", stream.id(), {-1}, 0, true);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    {
      std::vector<LateCopy> over;
      std::lock_guard<std::mutex> guard(late_mutex);
      over = arrive(num_late);
    }
    note_sync("device.synchronize");
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event{};
    auto* recorded = static_cast<Event*>(*event);
    // A new number each time: who waited for the last record waited for that one.
    recorded->id = next_event++;
    recorded->time = std::chrono::steady_clock::now();
    {
      std::lock_guard<std::mutex> guard(late_mutex);
      recorded->clock = clock_of(stream.id());
    }
    note(kRecordEvent, "", stream.id(), {recorded->id}, 0, false);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    {
      std::lock_guard<std::mutex> guard(late_mutex);
      advance(seen[stream.id()], static_cast<Event*>(event)->clock);
    }
    note(kWaitEvent, "", stream.id(), {static_cast<Event*>(event)->id}, 0, false);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    std::vector<LateCopy> over;
    std::lock_guard<std::mutex> guard(late_mutex);
    over = arrive(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!queryEvent(event) || event == nullptr) return;
    note_sync("event.synchronize", static_cast<Event*>(event)->id);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const auto passed = static_cast<Event*>(second)->time - static_cast<Event*>(first)->time;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const Block* block = block_of(data);
    if (block != nullptr) note(kRecordStream, "", stream.id(), {block->id}, 0, false);
  }
};

// A generator that says cuda:0; kernels draw from the one of the CPU behind it.
struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator values)
      : c10::GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        values(std::move(values)) {}
  void set_current_seed(uint64_t seed) override { values.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { values.set_offset(offset); }
  uint64_t get_offset() const override { return values.get_offset(); }
  uint64_t current_seed() const override { return values.current_seed(); }
  uint64_t seed() override { return values.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    values.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return values.get_state().unsafeReleaseIntrusivePtr();
  }
  c10::GeneratorImpl* clone_impl() const override { return new DeviceGenerator(values.clone()); }

  at::Generator values;
};

// Torch looks the hooks up by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kNumDevices; }
  int getNumGPUs() const override { return kNumDevices; }
  DeviceIndex current_device() const override { return kIndex; }
  DeviceIndex getCurrentDevice() const override { return kIndex; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return kIndex; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return kIndex; }
  Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>(at::detail::createCPUGenerator());
  }
};

// ----------------------------------------------------------------------- the same memory, twice

void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// The CPU tensors that one call shows to a kernel, and what they stand for.
class Call {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto* impl = tensor.unsafeGetTensorImpl();
    if (auto known = by_tensor_.find(impl); known != by_tensor_.end()) return known->second;
    c10::Storage storage = tensor.storage();
    auto found = storages_.find(storage.unsafeGetStorageImpl());
    if (found == storages_.end()) {
      c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), &drop_storage,
                        Device(DeviceType::CPU));
      c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                        c10::GetAllocator(DeviceType::CPU), /*resizable=*/true);
      found = storages_.emplace(storage.unsafeGetStorageImpl(), same).first;
      real_.emplace(same.unsafeGetStorageImpl(), storage);
      if (const Block* block = block_of(storage.data_ptr())) blocks.push_back(block->id);
    }
    at::Tensor alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                       tensor.storage_offset());
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    by_tensor_.emplace(impl, alias);
    by_alias_.emplace(alias.unsafeGetTensorImpl(), tensor);
    return alias;
  }

  at::Tensor to_cuda(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    if (auto known = by_alias_.find(tensor.unsafeGetTensorImpl()); known != by_alias_.end()) {
      return known->second;
    }
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto real = real_.find(storage);
    if (real == real_.end()) {
      auto* kept = new c10::Storage(tensor.storage());
      c10::DataPtr data(kept->mutable_data(), kept, &drop_storage, Device(DeviceType::CPU));
      const size_t bytes = kept->nbytes();
      c10::Storage made(c10::Storage::use_byte_size_t(), bytes, as_block(std::move(data), bytes),
                        &device_allocator, /*resizable=*/true);
      if (const Block* block = block_of(made.data_ptr())) blocks.push_back(block->id);
      real = real_.emplace(storage, made).first;
    }
    at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(real->second), c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                     tensor.storage_offset());
    return out;
  }

  // What a kernel resized: the tensor gets the alias's shape, and its memory if that moved.
  void take_back() {
    for (auto& [impl, alias] : by_tensor_) {
      at::Tensor& tensor = by_alias_.at(alias.unsafeGetTensorImpl());
      c10::Storage storage = tensor.storage();
      if (alias.storage().data() != storage.data() || alias.storage().nbytes() != storage.nbytes()) {
        auto* kept = new c10::Storage(alias.storage());
        c10::DataPtr data(kept->mutable_data(), kept, &drop_storage, Device(DeviceType::CPU));
        storage.set_data_ptr_noswap(as_block(std::move(data), kept->nbytes()));
        storage.set_nbytes(kept->nbytes());
      }
      if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides()) {
        impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      }
    }
  }

  std::vector<int64_t> blocks;

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> by_tensor_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> by_alias_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // real -> alias
  std::unordered_map<c10::StorageImpl*, c10::Storage> real_;      // alias -> real
};

template <typename Change>
IValue changed(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice()) return value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorVector()) out.push_back(change(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      out.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return out;
  }
  if (value.isList()) {
    const auto list = value.toList();
    if (!list.elementType()->isSubtypeOf(*c10::ListType::ofTensors())) return value;
    c10::List<c10::List<at::Tensor>> out;
    for (const IValue& item : list) {
      c10::List<at::Tensor> inner;
      for (const at::Tensor& tensor : item.toTensorVector()) inner.push_back(change(tensor));
      out.push_back(inner);
    }
    return out;
  }
  return value;
}

// ------------------------------------------------------------------------------- what is refused

// Torch moves their indices to the device, and waits for it.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" ||
      name == "aten::_unsafe_index";
}

int64_t num_host_indices(const std::string& name, const IValue& indices) {
  int64_t num = 0;
  // Torch has moved a copy of those of ``index`` already, to find the shape of its result.
  if (!takes_host_indices(name) || name == "aten::index") return num;
  for (const auto& index : indices.toOptionalTensorVector()) {
    num += index && index->defined() && !index->is_cuda() && index->dim() > 0;
  }
  return num;
}

void check_devices(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const auto& name = op.schema().name();
  if (takes_host_indices(name) && stack[stack.size() - op.schema().arguments().size()].toTensor().is_cuda()) return;
  std::vector<std::string> on_cpu;
  for (const IValue& value : stack) {
    changed(value, [&](const at::Tensor& tensor) {
      // Torch lets a scalar be anywhere.
      if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0) {
        on_cpu.push_back(c10::str(tensor.scalar_type(), tensor.sizes()));
      }
      return tensor;
    });
    if (value.isGenerator() && value.toGenerator().device().is_cpu()) {
      TORCH_CHECK(false, "Expected a 'cuda' device type for generator but found 'cpu' in ", name);
    }
  }
  TORCH_CHECK(on_cpu.empty(), "Expected all tensors to be on the same device, but found at least two "
              "devices, cuda:0 and cpu! (in ", name, ", on cpu: ", c10::Join(", ", on_cpu), ")");
}

// How often the CUDA kernel of an operator makes the host wait for the device.
int64_t num_syncs(const std::string& name, const torch::jit::Stack& stack) {
  static const std::unordered_map<std::string, int64_t> table = {
      {"aten::_local_scalar_dense", 1}, {"aten::nonzero", 1},   {"aten::masked_select", 1},
      {"aten::unique_consecutive", 1},  {"aten::_unique2", 1},  {"aten::_unique", 1},
      {"aten::unique_dim", 1},          {"aten::equal", 1},     {"aten::bincount", 2},
      {"aten::histc", 1},               {"aten::unique_dim_consecutive", 1},
  };
  if (name == "aten::repeat_interleave") return stack.back().isNone() ? 1 : 0;
  // Where the caller does not say how many values there will be, FBGEMM reads it.
  if (name == "fbgemm::permute_2D_sparse_data" || name == "fbgemm::permute_1D_sparse_data") {
    return stack.back().isNone() ? 1 : 0;
  }
  const auto at = table.find(name);
  return at == table.end() ? 0 : at->second;
}

int64_t longest(const at::Tensor& lengths) {
  return lengths.numel() == 0 ? 0 : lengths.max().item<int64_t>();
}

// The longest bag or segment that one warp or thread of the CUDA kernel would walk; 0 for others.
int64_t longest_segment(const std::string& name, const torch::jit::Stack& cpu) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (name == "aten::_embedding_bag" || name == "aten::_embedding_bag_forward_only") {
    at::Tensor offsets = cpu[2].toTensor().to(at::kLong);
    if (!cpu[7].toBool()) offsets = at::cat({offsets, at::full({1}, cpu[1].toTensor().numel())});
    return longest(offsets.diff());
  }
  if (name == "stand_in::lookup" || name == "stand_in::update") return longest(cpu[6].toTensor().diff());
  if (name.rfind("fbgemm::block_bucketize_sparse_features", 0) == 0) return longest(cpu[0].toTensor());
  return 0;
}

// ------------------------------------------------------------------------------------ fallback

std::mutex seen_mutex;
std::set<std::string> seen_operators;  // FBGEMM's, which not every release has

void note_seen(const std::string& name) {
  if (name.rfind("fbgemm::", 0) != 0) return;
  std::lock_guard<std::mutex> guard(seen_mutex);
  seen_operators.insert(name);
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  note_seen(name);
  const auto num_arguments = schema.arguments().size();
  const auto num_returns = schema.returns().size();
  check_devices(op, *stack);
  const auto begin = stack->size() - num_arguments;
  const int64_t num_waits = num_syncs(name, *stack);
  const int64_t num_moved = num_arguments > 1 ? num_host_indices(name, (*stack)[begin + 1]) : 0;
  Call call;
  for (auto at = begin; at < stack->size(); ++at) {
    IValue& value = (*stack)[at];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      value = value.toGenerator().get<DeviceGenerator>()->values;
    } else {
      value = changed(value, [&](const at::Tensor& tensor) { return call.to_cpu(tensor); });
    }
  }
  if (is_logging.load()) {
    const torch::jit::Stack arguments(stack->begin() + static_cast<int64_t>(begin), stack->end());
    note(kOperator, name, current_stream, call.blocks, longest_segment(name, arguments), true);
    for (int64_t i = 0; i < num_waits; ++i) note_sync(name);
    for (int64_t i = 0; i < num_moved; ++i) note_sync("copy to device");
  }
  if (num_waits > 0) arrive_of_stream(current_stream);
  call.blocks.clear();
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.take_back();
  for (auto at = stack->size() - num_returns; at < stack->size(); ++at) {
    (*stack)[at] =
        changed((*stack)[at], [&](const at::Tensor& tensor) { return call.to_cuda(tensor); });
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  run(op, stack);
}

// --------------------------------------------------------------- what touches memory and devices

at::Tensor make_empty(at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<at::ScalarType> dtype) {
  const auto type = c10::scalarTypeToTypeMeta(dtype.value_or(c10::get_default_dtype_as_scalartype()));
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, type.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, device_allocator.allocate(bytes),
                       &device_allocator, /*resizable=*/true);
  at::Tensor out = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), type);
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return out;
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat>) {
  return make_empty(size, c10::contiguous_strides(size), dtype);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<Device>, std::optional<bool>) {
  return make_empty(size, stride, dtype);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  const auto stride = c10::contiguous_strides(size);
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(),
                                                        self.storage_offset());
  c10::Storage storage = self.storage();
  if (bytes > storage.nbytes()) {
    c10::DataPtr more = device_allocator.allocate(bytes);
    if (storage.nbytes() > 0) std::memcpy(more.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(more));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(size, stride.empty() ? at::IntArrayRef(c10::contiguous_strides(size)) : stride,
                              offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto num = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {num}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, make_empty({0}, {1}, self.scalar_type()));
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool to_host = !self.is_cuda(), from_host = !source.is_cuda();
  const void* host = to_host ? self.storage().data() : source.storage().data();
  const std::string name = to_host ? "copy to host" : from_host ? "copy to device" : "aten::copy_";
  Call call;
  at::Tensor to = call.to_cpu(self), from = call.to_cpu(source);
  note(kOperator, name, current_stream, call.blocks, 0, true);
  if (to_host || from_host) {
    if (!non_blocking || (to_host && !is_pinned(host))) {
      note_sync(name);
      arrive_of_stream(current_stream);
    } else if (!is_pinned(host)) {
      note(kPageableCopy, name, current_stream, {}, 0, true);
    }
  }
  if (from_host) arrive_of_stream(current_stream);  // it may read what a copy before it brings
  if (to_host && non_blocking && is_pinned(host)) {
    arrive_late(current_stream, to, from);
    return self;
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  Call call;
  at::Tensor value = call.to_cpu(self);
  note(kOperator, "aten::_local_scalar_dense", current_stream, call.blocks, 0, true);
  note_sync("aten::_local_scalar_dense");
  arrive_of_stream(current_stream);
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::_local_scalar_dense(value);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  const Block* block = block_of(self.storage().data_ptr());
  if (block != nullptr) note(kRecordStream, "", stream.id(), {block->id}, 0, false);
}

// --------------------------------------------------------------------------------- collectives

// NCCL's kind of work: its results are on the device, and waiting holds up the stream.
class DeviceWork : public c10d::Work {
 public:
  DeviceWork(c10::intrusive_ptr<c10d::Work> inner, std::vector<at::Tensor> tensors)
      : c10d::Work(-1, inner->retrieveOpType()), inner_(std::move(inner)), tensors_(std::move(tensors)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    tensors_.clear();  // kept alive until the stream waits, as NCCL's work does
    return done;
  }
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<Device>{kDevice});
    inner_->getFuture()->addCallback(
        [future = future_, tensors = tensors_](c10::ivalue::Future& done) {
          if (done.hasError()) {
            future->setError(done.exception_ptr());
          } else {
            future->markCompleted(IValue(tensors));
          }
        });
    return future_;
  }

 private:
  c10::intrusive_ptr<c10d::Work> inner_;
  std::vector<at::Tensor> tensors_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Gloo has no all-to-all of lists: one message, cut up again when it is there.
c10::intrusive_ptr<c10d::Work> all_to_all_of_lists(c10d::ProcessGroup& group, Call& call,
                                                   const std::vector<at::Tensor>& to,
                                                   const std::vector<at::Tensor>& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  std::vector<at::Tensor> sent, received;
  std::vector<int64_t> sent_sizes, received_sizes;
  for (const at::Tensor& tensor : from) {
    sent.push_back(call.to_cpu(tensor).reshape(-1));
    sent_sizes.push_back(tensor.numel());
  }
  for (const at::Tensor& tensor : to) {
    received.push_back(call.to_cpu(tensor));
    received_sizes.push_back(tensor.numel());
  }
  at::Tensor message = at::cat(sent);
  const auto num = std::accumulate(received_sizes.begin(), received_sizes.end(), int64_t{0});
  at::Tensor heard = at::empty({num}, message.options());
  auto work = group.alltoall_base(heard, message, received_sizes, sent_sizes);
  work->wait();
  const auto parts = heard.split(received_sizes);
  for (size_t at = 0; at < received.size(); ++at) {
    received[at].copy_(parts[at].view(received[at].sizes()));
  }
  return work;
}

// Gloo gathers equal sizes alone, NCCL any: everybody sends as much as the largest.
c10::intrusive_ptr<c10d::Work> all_gather_of_lists(c10d::ProcessGroup& group, Call& call,
                                                   const std::vector<at::Tensor>& to,
                                                   const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  int64_t most = 0;
  for (const at::Tensor& tensor : to) most = std::max(most, tensor.numel());
  at::Tensor own = call.to_cpu(from).reshape(-1);
  at::Tensor message = at::zeros({most}, own.options());
  message.narrow(0, 0, own.numel()).copy_(own);
  std::vector<std::vector<at::Tensor>> heard(1);
  for (size_t at = 0; at < to.size(); ++at) heard[0].push_back(at::empty_like(message));
  std::vector<at::Tensor> messages{message};
  auto work = group.allgather(heard, messages);
  work->wait();
  for (size_t at = 0; at < to.size(); ++at) {
    at::Tensor out = call.to_cpu(to[at]);
    out.copy_(heard[0][at].narrow(0, 0, out.numel()).view(out.sizes()));
  }
  return work;
}

bool is_uneven(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) {
    if (tensor.numel() != tensors[0].numel()) return true;
  }
  return false;
}

void collective(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto num_arguments = op.schema().arguments().size();
  const auto num_returns = op.schema().returns().size();
  std::vector<at::Tensor> tensors;
  std::string group = "?", sizes;
  for (auto at = stack->size() - num_arguments; at < stack->size(); ++at) {
    const IValue& value = (*stack)[at];
    if (value.isObject()) {
      try {
        group = value.toCustomClass<c10d::ProcessGroup>()->getGroupName();
      } catch (const c10::Error&) {  // a ReduceOp
      }
      continue;
    }
    const bool is_first = tensors.empty();
    changed(value, [&](const at::Tensor& tensor) {
      if (tensor.defined()) {
        // Sizes of all-to-all differ by rank: dtype and whether it is sent at all must agree.
        sizes += c10::str(" ", tensor.scalar_type(), "x", tensor.numel());
        if (is_first) tensors.push_back(tensor);
      }
      return tensor;
    });
  }
  note(kCollective, op.schema().name() + "|" + group + "|" + sizes, current_stream, {}, 0, true);
  const auto first = stack->size() - num_arguments;
  const bool is_all_to_all = op.schema().name() == "c10d::alltoall_";
  std::vector<at::Tensor> gathered;
  if (op.schema().name() == "c10d::allgather_") {
    gathered = (*stack)[first].toList().get(0).toTensorVector();
  }
  if (is_all_to_all || is_uneven(gathered)) {
    check_devices(op, *stack);
    const IValue to = (*stack)[first];
    auto pg = (*stack)[first + 2].toCustomClass<c10d::ProcessGroup>();
    const auto from = (*stack)[first + 1].toTensorVector();
    Call call;
    auto work = is_all_to_all ? all_to_all_of_lists(*pg, call, to.toTensorVector(), from)
                              : all_gather_of_lists(*pg, call, gathered, from[0]);
    note(kOperator, op.schema().name(), current_stream, call.blocks, 0, true);
    torch::jit::drop(*stack, num_arguments);
    torch::jit::push(*stack, to, work);
  } else {
    run(op, stack);
  }
  for (auto at = stack->size() - num_returns; at < stack->size(); ++at) {
    IValue& value = (*stack)[at];
    if (!value.isObject()) continue;
    auto inner = value.toCustomClass<c10d::Work>();
    value = IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<DeviceWork>(inner, tensors)));
  }
}

// What DDP wants of a device it times.
class HostTimer final : public c10d::Timer {
 public:
  explicit HostTimer(Device) {}
  std::optional<int64_t> measureDifference(Event begin, Event end) override {
    return getTimeRef(end) - getTimeRef(begin);
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, HostTimer)
}  // namespace c10d

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("as_strided", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                          std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", [](const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("copy_", &copy);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "allgather_", "_allgather_base_",
        "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_",
        "alltoall_", "alltoall_base_", "send", "recv_", "barrier"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
  }
}

extern "C" {

void stand_in_start(int64_t (*place)()) {
  c10::SetAllocator(DeviceType::CUDA, &device_allocator);
  find_place = place;
}

void stand_in_log(int is_on) { is_logging = is_on != 0; }

// An operator that is not one of torch's: a lookup that Python computes.
void stand_in_note(const char* name, int64_t value) {
  note(kOperator, name, current_stream, {}, value, true);
}

void stand_in_seen(void (*take)(const char*)) {
  std::lock_guard<std::mutex> guard(seen_mutex);
  for (const std::string& name : seen_operators) take(name.c_str());
}

int64_t stand_in_size() {
  std::lock_guard<std::mutex> guard(log_mutex);
  return static_cast<int64_t>(entries.size());
}

// Gives every entry to ``take`` and forgets it.
void stand_in_drain(void (*take)(int64_t, int64_t, int64_t, int64_t, int64_t, const char*,
                                 const int64_t*, int64_t)) {
  std::deque<Entry> taken;
  {
    std::lock_guard<std::mutex> guard(log_mutex);
    taken.swap(entries);
  }
  for (const Entry& e : taken) {
    take(e.kind, e.stream, e.thread, e.place, e.value, e.name.c_str(), e.ids.data(),
         static_cast<int64_t>(e.ids.size()));
  }
}

int64_t stand_in_allocated(int most) { return most ? most_allocated_bytes.load() : allocated_bytes.load(); }

void stand_in_reset_most() { most_allocated_bytes = allocated_bytes.load(); }

}  // extern "C"
