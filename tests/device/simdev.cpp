// A device that exists only in this process, for tests of work on streams.
//
// Device memory is mapped twice. Tensors hold addresses of a mapping without access, so a host that
// reads or writes there dies by SIGSEGV. Kernels use the other mapping. A stream is a thread that
// does its work in order, and late. Kernels are PyTorch's own for the CPU, run on that thread.
//
// Written against PyTorch 2.13. `simulated.py` builds and loads it.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

extern "C" __attribute__((weak)) void omp_set_num_threads(int);

namespace simdev {
constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr int POOL = 32;  // streams per priority, handed out in turns, as CUDA's are
constexpr int HOST_POISON = 0xB7, DEVICE_POISON = 0xD9;
constexpr size_t ARENA_BYTES = size_t(64) << 30;  // of addresses: only what is written takes memory

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Nanos = std::chrono::nanoseconds;
using Lock = std::lock_guard<std::mutex>;

// Stream threads outlive static objects, so whatever they use is never destroyed.
template <typename T>
T& forever() {
  static T& it = *new T;
  return it;
}

// ---- Faults, counters and costs ----------------------------------------------------------------
struct Ledger {
  std::mutex lock;
  std::map<std::pair<std::string, int64_t>, int64_t> counts;  // by name and native thread id
  std::string fault;   // sticky: fails all later calls, like an illegal address on a GPU
  std::string misuse;  // of host memory: reported only, because later calls can still work
};
Ledger& ledger() { return forever<Ledger>(); }

void count(const std::string& what) {
  static thread_local const int64_t thread = gettid();
  Lock held(ledger().lock);
  ++ledger().counts[{what, thread}];
}
void fault(const std::string& what) {
  Lock held(ledger().lock);
  if (ledger().fault.empty()) ledger().fault = what;
}
void misuse(const std::string& what) {
  Lock held(ledger().lock);
  if (ledger().misuse.empty()) ledger().misuse = what;
}
void raise_fault() {
  Lock held(ledger().lock);
  TORCH_CHECK(ledger().fault.empty(), "sim: the device failed: ", ledger().fault);
}

struct Costs {
  std::atomic<int64_t> launch_ns{0};
  std::atomic<double> copy_gbps{0}, kernel_gbps{0};  // 0: no time
  std::atomic<bool> dry{false};                      // copies and page kernels move no bytes
};
Costs& costs() { return forever<Costs>(); }
Nanos lasting(double gbps, double bytes) { return Nanos(gbps > 0 ? int64_t(bytes / gbps) : 0); }

// A call of the driver: counted, and it takes the calling thread the time of a launch.
struct Launch {
  const Time begun = Clock::now();
  explicit Launch(const std::string& what) {
    raise_fault();
    count(what);
  }
  ~Launch() {
    const Time until = begun + Nanos(costs().launch_ns.load());
    while (Clock::now() < until) {
    }
  }
};

// Poisons only pages that are in use, because writing to others would take memory for them.
void poison(uint8_t* at, size_t size, int value, bool dry) {
  if (dry) return;
  constexpr uintptr_t PAGE = 4096;
  auto *const end = at + size, *page = (uint8_t*)((uintptr_t)at & ~(PAGE - 1));
  std::vector<unsigned char> in_use((end - page + PAGE - 1) / PAGE);
  if (mincore(page, end - page, in_use.data()) != 0) return;
  for (size_t i = 0; i < in_use.size(); ++i, page += PAGE)
    if (in_use[i] & 1)
      memset(std::max(page, at), value, std::min(page + PAGE, end) - std::max(page, at));
}

// ---- Streams and events ------------------------------------------------------------------------
struct Point {  // one recording of an event
  std::mutex lock;
  std::condition_variable passed;
  bool is_done = false;
  Time at{};  // on the clock of its stream
  void pass(Time now) {
    {
      Lock held(lock);
      is_done = true, at = now;
    }
    passed.notify_all();
  }
  Time wait() {
    std::unique_lock held(lock);
    passed.wait(held, [&] { return is_done; });
    return at;
  }
  bool done() {
    Lock held(lock);
    return is_done;
  }
};
using PointPtr = std::shared_ptr<Point>;

// What streams of a device share: the copy engine of each direction, and memory bandwidth.
enum Way { TO_DEVICE, TO_HOST, KERNEL, WAYS };
struct Engine {
  std::mutex lock;
  Time free{};
  Time reserve(Time from, Nanos lasts) {
    Lock held(lock);
    from = std::max(from, free);
    free = from + lasts;
    return from;
  }
};
Engine& engine(int device, Way way) { return forever<std::array<std::array<Engine, WAYS>, DEVICES>>()[device][way]; }

struct Delay {  // of each operation; a stream without one has its device's
  std::atomic<int64_t> low_us{-1}, high_us{-1};
};
Delay& device_delay(int device) { return forever<std::array<Delay, DEVICES>>()[device]; }
std::atomic<int64_t> g_seed{0}, g_seeded{0};  // and how often it was set

struct Task {
  std::function<void()> work;
  Nanos lasts{0};
  Engine* engine = nullptr;
  bool is_operation = true;  // otherwise bookkeeping, which takes no time
  PointPtr point = nullptr;  // passes after the work
  Time given = Clock::now();
};

struct Queue {
  Queue(int device, int64_t id) : device(device), id(id) {
    std::thread([this] { run(); }).detach();
  }
  void give(Task task) {
    {
      Lock held(lock);
      tasks.push_back(std::move(task));
      ++given;
    }
    more.notify_all();
  }
  void keep_books(std::function<void()> work) {
    give({.work = std::move(work), .is_operation = false});
  }
  PointPtr point() {
    auto point = std::make_shared<Point>();
    give({.work = [] {}, .is_operation = false, .point = point});
    return point;
  }
  void wait_for(PointPtr point) {
    keep_books([this, point] { clock = std::max(clock, point->wait()); });
  }
  void synchronize() {
    count("synchronize");
    point()->wait();
    raise_fault();
  }
  bool idle() {
    Lock held(lock);
    return done == given;
  }
  void cut() {  // the delay of the present operation ends
    {
      Lock held(lock);
      ++cuts;
    }
    more.notify_all();
  }
  void hold(bool on) {
    {
      Lock held(lock);
      is_held = on;
      if (!on) released = Clock::now();
    }
    more.notify_all();
  }

  void run() {
    prctl(PR_SET_TIMERSLACK, 1);  // otherwise sleeps are 50 us late
    if (omp_set_num_threads) omp_set_num_threads(1);
    c10::InferenceMode inference(true);  // otherwise tensors made in that mode are read-only
    for (;;) {
      Task task;
      {
        std::unique_lock held(lock);
        more.wait(held, [&] { return !is_held && !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
        clock = std::max({clock, task.given, released});
      }
      try {
        task.is_operation ? operate(task) : task.work();
      } catch (const c10::Error& error) {
        fault(error.what_without_backtrace());
      } catch (const std::exception& error) {
        fault(error.what());
      }
      task.work = nullptr;
      {
        Lock held(lock);
        ++done;
      }
      if (task.point) task.point->pass(clock);
    }
  }
  // The clock of a stream advances by what operations last, not by how late its thread wakes, so
  // many short operations take as long as the model says.
  void operate(Task& task) {
    if (const auto delay = draw_delay(); delay.count() > 0) {
      std::unique_lock held(lock);
      const auto begun = Clock::now();
      const bool is_cut = more.wait_for(held, delay, [&, before = cuts] { return cuts != before; });
      clock += is_cut ? Clock::now() - begun : delay;
    }
    if (task.engine) clock = task.engine->reserve(clock, task.lasts);
    const Time begun = Clock::now();
    task.work();
    clock += std::max<Nanos>(task.lasts, Clock::now() - begun);
    if (task.lasts.count() > 0) std::this_thread::sleep_until(clock);
  }
  Nanos draw_delay() {
    if (seeded != g_seeded) dice.seed(g_seed * 7919 + device * 977 + id);
    seeded = g_seeded;
    Delay& mine = delay.high_us >= 0 ? delay : device_delay(device);
    if (mine.high_us <= 0) return Nanos(0);
    const int64_t low = std::min(mine.low_us, mine.high_us), high = mine.high_us;
    return std::chrono::microseconds(std::uniform_int_distribution<int64_t>(low, high)(dice));
  }

  const int device;
  const int64_t id;
  Delay delay;
  Time clock{};  // only for its thread
 private:
  std::mutex lock;
  std::condition_variable more;
  std::deque<Task> tasks;
  uint64_t given = 0, done = 0;
  bool is_held = false;
  Time released{};
  int64_t seeded = -1;
  uint64_t cuts = 0;
  std::mt19937_64 dice;
};

// Stream 0 is the default one, 1 to POOL are urgent, and POOL + 1 to 2 * POOL are not.
struct Queues {
  std::mutex lock;
  std::map<int64_t, Queue*> of[DEVICES];
};
Queue& queue(int device, int64_t id) {
  auto& all = forever<Queues>();
  Lock held(all.lock);
  auto& found = all.of[device][id];
  if (!found) found = new Queue(device, id);
  return *found;
}
std::vector<Queue*> queues(int device) {
  auto& all = forever<Queues>();
  Lock held(all.lock);
  std::vector<Queue*> found;
  for (auto& [id, queue] : all.of[device]) found.push_back(queue);
  return found;
}
thread_local c10::DeviceIndex t_device = 0;
thread_local int64_t t_streams[DEVICES] = {};
Queue& current(int device) { return queue(device, t_streams[device]); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = KIND;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  static int at(c10::Device d) { return d.index() < 0 ? t_device : d.index(); }
  static Queue& of(const c10::Stream& s) { return queue(s.device_index(), s.id()); }
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id);
  }
  static PointPtr& point(void* event) { return *static_cast<PointPtr*>(event); }

  c10::DeviceType type() const override { return KIND; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Device getDevice() const override { return c10::Device(KIND, t_device); }
  c10::Device exchangeDevice(c10::Device d) const override {
    const auto before = getDevice();
    setDevice(d);
    return before;
  }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() < DEVICES, "sim: there is no device ", d);
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) t_device = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return stream(at(d), t_streams[at(d)]); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(at(d), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool urgent) const override {
    return getNewStream(d, urgent ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device d, int priority) const override {
    static std::atomic<int> next[DEVICES][2];
    const int row = priority < 0 ? 0 : 1;
    return stream(at(d), 1 + row * POOL + next[at(d)][row]++ % POOL);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    const auto before = getStream(s.device());
    t_streams[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const c10::Stream& s) const override {
    Launch call("query");
    return of(s).idle();
  }
  void synchronizeStream(const c10::Stream& s) const override { of(s).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (Queue* each : queues(device)) each->synchronize();
  }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Launch call("event");
    if (!*event) *event = new PointPtr;
    point(*event) = of(s).point();
  }
  void block(void* event, const c10::Stream& s) const override {
    Launch call("stream wait");
    if (event) of(s).wait_for(point(event));
  }
  bool queryEvent(void* event) const override {
    Launch call("query");
    return !event || point(event)->done();
  }
  void synchronizeEvent(void* event) const override {
    count("synchronize");
    if (event) point(event)->wait();
    raise_fault();
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end && point(begin)->done() && point(end)->done(), "sim: not finished");
    return std::chrono::duration<double, std::milli>(point(end)->at - point(begin)->at).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<PointPtr*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- Device memory -----------------------------------------------------------------------------
struct Arena {
  Arena() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    device = (uint8_t*)mmap(nullptr, ARENA_BYTES, PROT_NONE, flags, -1, 0);
    kernel = (uint8_t*)mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    TORCH_CHECK(device != MAP_FAILED && kernel != MAP_FAILED, "sim: no address space is left");
  }
  bool owns(const void* at, size_t size = 1) const {
    return at >= device && (const uint8_t*)at + size <= device + used;
  }
  uint8_t *device, *kernel;
  std::atomic<size_t> used{0};
};
Arena& arena(int device) { return forever<std::array<Arena, DEVICES>>()[device]; }
int owner(const void* at, size_t size = 1) {  // the device of an address, or -1
  for (int device = 0; device < DEVICES; ++device)
    if (arena(device).owns(at, size)) return device;
  return -1;
}
void* behind(const void* at) {  // where kernels have it
  const int device = owner(at);
  return device < 0 ? nullptr
                    : arena(device).kernel + ((const uint8_t*)at - arena(device).device);
}

void give_back(uint8_t* at, size_t size) {  // to the system, but for pages that are shared
  const auto page = (uintptr_t)sysconf(_SC_PAGESIZE);
  const auto start = ((uintptr_t)at + page - 1) / page * page, end = ((uintptr_t)at + size) / page * page;
  if (start < end) madvise((void*)start, end - start, MADV_DONTNEED);
}

// Like CUDA's caching allocator: freed memory can be had again at once on the stream that it was
// allocated on, so only that stream's order protects it.
struct DeviceMemory final : c10::DeviceAllocator {
  struct Block {
    size_t size;
    int device;
    int64_t stream;
    std::set<int64_t> others;  // streams that were recorded too
  };
  std::mutex lock;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<uint8_t*>> unused;
  std::map<void*, Block> live;
  size_t live_bytes[DEVICES] = {};

  at::DataPtr allocate(size_t nbytes) override {
    const auto here = c10::Device(KIND, t_device);
    if (!nbytes) return {nullptr, nullptr, &drop, here};
    count("allocate");
    const size_t grain = nbytes > (1 << 20) ? 1 << 20 : 512;
    const size_t size = (nbytes + grain - 1) / grain * grain;
    const int64_t stream = t_streams[t_device];
    Lock held(lock);
    auto& same = unused[{t_device, stream, size}];
    uint8_t* at;
    if (!same.empty()) {
      at = same.back();
      same.pop_back();
    } else {
      auto& from = arena(t_device);
      TORCH_CHECK_WITH(OutOfMemoryError, from.used + size <= ARENA_BYTES, "sim: out of memory");
      at = from.device + from.used.fetch_add(size);
    }
    live[at] = {size, t_device, stream, {}};
    live_bytes[t_device] += size;
    return {at, at, &drop, here};
  }
  void free(void* at) {
    Lock held(lock);
    const auto block = live.at(at);
    live.erase(at);
    live_bytes[block.device] -= block.size;
    auto& stream = queue(block.device, block.stream);
    for (auto id : block.others) stream.wait_for(queue(block.device, id).point());
    stream.keep_books([memory = (uint8_t*)behind(at), size = block.size, dry = costs().dry.load()] {
      poison(memory, size, DEVICE_POISON, dry);
    });
    unused[{block.device, block.stream, block.size}].push_back((uint8_t*)at);
  }
  void trim() {
    Lock held(lock);
    for (auto& [key, same] : unused)
      for (auto at : same) give_back((uint8_t*)behind(at), std::get<2>(key));
  }
  void recordStream(const at::DataPtr& data, c10::Stream s) override {
    Lock held(lock);
    const auto found = live.find(data.get_context());
    if (found != live.end() && found->second.stream != s.id()) found->second.others.insert(s.id());
  }
  static void drop(void* at);
  at::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override {
    memcpy(behind(to), behind(from), n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock held(lock);
    return {ARENA_BYTES - live_bytes[device], ARENA_BYTES};
  }
};
DeviceMemory& device_memory() { return forever<DeviceMemory>(); }
void DeviceMemory::drop(void* at) {
  if (at) device_memory().free(at);
}
void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const {
  device_memory().recordStream(data, s);
}

// ---- Host memory that the device can reach -----------------------------------------------------
// Memory of PyTorch's pinned allocator, which is never given back to the system, and memory that
// was registered in place.
struct HostMemory final : at::HostAllocator {
  struct Piece {
    size_t size;
    std::vector<PointPtr> uses;
  };
  struct Use {
    std::atomic<int> copies{0};  // under way
    std::atomic<bool> is_gone{false};
    bool fails() const {  // instead of dying in a copy
      if (is_gone) fault("a copy of host memory that was unregistered meanwhile");
      return is_gone;
    }
  };
  struct Registered {
    size_t size;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;  // none if by address
    std::shared_ptr<Use> use;
    bool is_read_only = false;
  };
  std::mutex lock;
  std::map<uint8_t*, Piece> live;
  std::map<uint8_t*, size_t> pinned;  // live or not
  std::map<uint8_t*, Registered> registered;
  std::vector<std::pair<uint8_t*, Piece>> waiting;  // freed, but copies of it are under way
  std::map<size_t, std::vector<uint8_t*>> unused;

  at::DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &drop, at::kCPU};
    count("pin");
    size_t size = 4096;
    while (size < nbytes) size *= 2;
    Lock held(lock);
    poison_finished();
    auto& same = unused[size];
    uint8_t* at;
    if (!same.empty()) {
      at = same.back();
      same.pop_back();
    } else {
      const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
      at = (uint8_t*)mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, -1, 0);
      TORCH_CHECK(at != MAP_FAILED, "sim: out of host memory");
      pinned[at] = size;
    }
    live[at] = {size, {}};
    return {at, at, &drop, at::kCPU};
  }
  void free(void* at) {
    Lock held(lock);
    const auto found = live.find((uint8_t*)at);
    waiting.emplace_back(found->first, std::move(found->second));
    live.erase(found);
    poison_finished();
  }
  void poison_finished() {
    std::erase_if(waiting, [&](auto& entry) {
      auto& [at, piece] = entry;
      for (auto& use : piece.uses)
        if (!use->done()) return false;
      poison(at, piece.size, HOST_POISON, costs().dry);
      unused[piece.size].push_back(at);
      return true;
    });
  }
  void trim() {
    Lock held(lock);
    poison_finished();
    for (auto& [size, same] : unused)
      for (auto at : same) give_back(at, size);
  }
  static void drop(void* at);
  at::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool record_event(void* at, void* context, c10::Stream s) override {
    Lock held(lock);
    auto found = live.find((uint8_t*)context);
    // As on CUDA: a tensor over part of the memory that somebody else made is not recognised.
    if (found == live.end()) found = live.find((uint8_t*)at);
    if (found == live.end()) return false;
    found->second.uses.push_back(Guard::of(s).point());
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  // Whether these bytes begin in one piece of page-locked memory and end in another. CUDA refuses a
  // copy of them (seen with CUDA 13.0, driver 580, an H200).
  bool spans(const void* at, size_t size) {
    auto* const from = (const uint8_t*)at;
    return size && !reaches(at, size) && reaches(from, 1) && reaches(from + size - 1, 1);
  }
  // Whether the device can reach all these bytes. `use` keeps registered memory in use.
  bool reaches(const void* at, size_t size, std::shared_ptr<Use>* use = nullptr,
               bool writes = false) {
    auto* const from = (uint8_t*)at;
    Lock held(lock);
    auto next = pinned.upper_bound(from);
    if (next != pinned.begin() && from + size <= (--next)->first + next->second) return true;
    auto entry = registered.upper_bound(from);
    if (entry == registered.begin() || from + size > (--entry)->first + entry->second.size)
      return false;
    if (!costs().dry) check_alive(*entry);  // which takes longer the more memory there is
    if (writes && entry->second.is_read_only)
      fault("a copy to host memory that is registered for reading");
    if (use) {
      auto whole = entry->second.use;
      ++whole->copies;
      *use = std::shared_ptr<Use>(whole.get(), [whole](Use*) { --whole->copies; });
    }
    return true;
  }
  // An owner may unlock memory while its storage is being freed: the pages are still mapped then.
  static bool check_alive(const std::pair<uint8_t* const, Registered>& entry, bool is_last = false) {
    if (is_alive(entry, is_last)) return true;
    misuse("host memory is freed while registered");
    return false;
  }
  static bool is_alive(const std::pair<uint8_t* const, Registered>& entry, bool is_last = false) {
    const auto& [at, memory] = entry;
    std::vector<unsigned char> pages(memory.size / 4096 + 2);
    auto* const page = (uint8_t*)((uintptr_t)at & ~uintptr_t(4095));
    return (is_last || !memory.storage || !memory.storage->expired()) &&
           mincore(page, at + memory.size - page, pages.data()) == 0;
  }
  void check_all_alive() {
    // Another thread that is just freeing memory has a second to unlock it.
    for (int look = 0; look < 1000 && !are_all_alive(); ++look)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (!are_all_alive()) misuse("host memory is freed while registered");
  }
  bool are_all_alive() {
    Lock held(lock);
    return std::all_of(registered.begin(), registered.end(),
                       [](const auto& entry) { return is_alive(entry); });
  }
  void forget_dead() {
    Lock held(lock);
    std::erase_if(registered, [](const auto& entry) { return !is_alive(entry); });
  }
  void add(const at::Tensor& memory) {
    count("register");
    TORCH_CHECK(memory.is_cpu() && memory.is_contiguous() && memory.nbytes(), "not host memory");
    auto* const at = (uint8_t*)memory.data_ptr();
    if (!is_mapped(at, memory.nbytes(), 'w')) refuse("mapped read-only");
    Lock held(lock);
    insert(at, {memory.nbytes(), memory.storage().getWeakStorageImpl()});
  }
  void add_read_only(int64_t address, int64_t size) {
    count("register");
    auto* const at = (uint8_t*)address;
    if (!is_mapped(at, size, 'r')) refuse("not mapped");
    Lock held(lock);
    insert(at, {.size = size_t(size), .is_read_only = true});
  }
  void insert(uint8_t* at, Registered fresh) {
    for (const auto& [other, size] : pinned)
      if (at < other + size && other < at + fresh.size) refuse("already pinned");
    for (const auto& [other, entry] : registered)
      if (at < other + entry.size && other < at + fresh.size) refuse("already registered");
    fresh.use = std::make_shared<Use>();
    registered.emplace(at, std::move(fresh));
  }
  static bool is_mapped(const uint8_t* at, size_t size, char right) {
    std::ifstream maps("/proc/self/maps");
    auto next = (uintptr_t)at;
    const auto end = next + size;
    for (std::string line; next < end && std::getline(maps, line);) {
      uintptr_t first, last;
      char rights[5];
      if (sscanf(line.c_str(), "%lx-%lx %4s", &first, &last, rights) != 3 || last <= next) continue;
      if (first > next || !strchr(rights, right)) return false;
      next = last;
    }
    return next >= end;
  }
  void remove(int64_t address) {
    count("unregister");
    Lock held(lock);
    const auto found = registered.find((uint8_t*)address);
    if (found == registered.end()) refuse("not registered");
    const auto use = found->second.use;
    const bool is_alive = check_alive(*found, true), is_busy = use->copies > 0;
    use->is_gone = true;
    registered.erase(found);
    if (!is_alive) refuse("freed while registered");
    if (is_busy) refuse("unregistered while copies of it are under way");
  }
  [[noreturn]] static void refuse(const std::string& why) {
    misuse("host memory is " + why);
    TORCH_CHECK(false, "sim: host memory is ", why);
    __builtin_unreachable();
  }
};
HostMemory& host_memory() { return forever<HostMemory>(); }
void HostMemory::drop(void* at) {
  if (at) host_memory().free(at);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(c10::DeviceIndex d) const override { exchangeDevice(d); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {
    return Guard().exchangeDevice(c10::Device(KIND, d)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override {
    return exchangeDevice(d);  // -1 changes nothing
  }
  bool isPinnedPtr(const void* at) const override { return host_memory().reaches(at, 1); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_memory(); }
  at::Device getDeviceFromPtr(void* at) const override {
    TORCH_CHECK(owner(at) >= 0, "sim: not an address of a device");
    return c10::Device(KIND, owner(at));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DeviceGuard guard(storage.device());
    auto fresh = device_memory().allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    current(t_device).keep_books([to = behind(fresh.get()), from = behind(storage.data()), kept] {
      if (kept) memcpy(to, from, kept);
    });
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
};

// ---- Tensors and copies ------------------------------------------------------------------------
bool is_here(const at::Tensor& t) { return t.defined() && t.device().type() == KIND; }
at::Tensor kernel_view(const at::Tensor& t) {  // does not own the memory, like a kernel's argument
  return at::from_blob(behind(t.const_data_ptr()), t.sizes(), t.strides(),
                       t.options().device(at::kCPU));
}
at::Tensor host_view(const at::Tensor& t) {  // does not own the memory either
  return at::from_blob(const_cast<void*>(t.const_data_ptr()), t.sizes(), t.strides(), t.options());
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "sim: only host memory can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  const auto device = (is_here(to) ? to : from).device();
  auto& stream = current(device.index());
  const bool is_plain = from.scalar_type() == to.scalar_type() && from.strides() == to.strides() &&
      from.is_non_overlapping_and_dense();
  const auto& costs = simdev::costs();
  if (is_here(from) && is_here(to)) {
    Launch call("d2d");
    auto& source = current(from.device().index());
    if (&source != &stream) stream.wait_for(source.point());
    stream.give({[a = kernel_view(from), b = kernel_view(to)]() mutable { b.copy_(a); },
                 lasting(costs.kernel_gbps, to.nbytes()), &engine(device.index(), KERNEL)});
    if (&source != &stream) source.wait_for(stream.point());
    return to;
  }
  const bool is_up = is_here(to);
  const auto& host = is_up ? from : to;
  std::shared_ptr<HostMemory::Use> use;
  const bool is_pinned = host_memory().reaches(host.const_data_ptr(), host.nbytes(), &use, !is_up);
  TORCH_CHECK(is_pinned || !host_memory().spans(host.const_data_ptr(), host.nbytes()),
              "sim: invalid argument: a copy of two pieces of page-locked memory");
  const bool is_async = is_pinned && is_plain && non_blocking;
  Launch call(std::string(is_up ? "h2d" : "d2h") +
              (!is_pinned ? " pageable" : !is_plain ? " strided" : non_blocking ? "" : " blocking"));
  auto a = is_up ? host_view(from) : kernel_view(from);
  auto b = is_up ? kernel_view(to) : host_view(to);
  const bool is_dry = costs.dry && is_async;
  stream.give({[a, b, use = std::move(use), is_dry]() mutable {
                 if (!is_dry && !(use && use->fails())) b.copy_(a);
                 use.reset();
               },
               lasting(costs.copy_gbps, to.nbytes()),
               &engine(device.index(), is_up ? TO_DEVICE : TO_HOST)});
  if (is_async)
    host_memory().record_event(const_cast<void*>(host.const_data_ptr()),
                               host.storage().data_ptr().get_context(), Guard().getStream(device));
  else
    stream.synchronize();
  return to;
}
const at::Tensor& resized(const at::Tensor& t, c10::IntArrayRef size) {
  const auto offset = t.storage_offset();
  const auto nbytes = at::detail::computeStorageNbytesContiguous(size, t.itemsize(), offset);
  if (nbytes > t.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(t.storage(), nbytes);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resized(to, from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar(const at::Tensor& t) {
  auto host = at::empty({}, t.options().device(at::kCPU));
  copy_from(t.reshape({}), host, false);
  return host.item();
}

// ---- Any other operator ------------------------------------------------------------------------
// PyTorch's CPU kernel, on the current stream. The meta device tells the shapes of what it returns.
// Operators for which it cannot are done at once, after the stream.
void do_at_once(const c10::OperatorHandle& op, torch::jit::Stack* stack, const char* why) {
  count("at once " + op.schema().name() + ": " + why);
  at::native::cpu_fallback(op, stack);
}
template <typename F>
c10::IValue mapped(const c10::IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& t : value.toTensorList()) out.push_back(f(t));
    return out;
  }
  if (value.isList() && value.toList().elementType()->isSubtypeOf(*c10::OptionalType::ofTensor())) {
    c10::List<std::optional<at::Tensor>> out;
    for (const c10::IValue& e : value.toListRef())
      out.push_back(e.isNone() ? std::optional<at::Tensor>() : f(e.toTensor()));
    return out;
  }
  return value;
}
// The arguments with each tensor as `f` makes it, and with `device` as the device to make tensors on.
template <typename F>
torch::jit::Stack all_mapped(const c10::FunctionSchema& schema, const torch::jit::Stack& args,
                             c10::Device device, F&& f) {
  torch::jit::Stack out;
  for (size_t i = 0; i < args.size(); ++i) {
    const bool is_device = schema.arguments()[i].type()->str().find("Device") != std::string::npos;
    out.push_back(is_device ? c10::IValue(device) : mapped(args[i], f));
  }
  return out;
}
void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  const torch::jit::Stack args(stack->end() - n, stack->end());
  std::vector<size_t> written;  // arguments
  std::optional<c10::Device> device;
  double read_bytes = 0, written_bytes = 0;  // of the largest tensor
  auto is_written = [&](size_t i) {
    const auto* alias = schema.arguments()[i].alias_info();
    return alias && alias->isWrite();
  };
  for (size_t i = 0; i < n; ++i) {
    if (!is_written(i)) continue;
    if (!args[i].isTensor()) return do_at_once(op, stack, "writes a list");
    written.push_back(i);
  }
  bool is_in_place = written == std::vector<size_t>{0} && schema.name().back() == '_';
  for (size_t i = 0; i < n; ++i)
    mapped(args[i], [&](const at::Tensor& t) {
      if (!is_here(t)) return t;
      if (!device) device = t.device();
      auto is_same = [&](size_t k) { return args[k].toTensor().is_same(t); };
      const bool is_output = std::any_of(written.begin(), written.end(), is_same);
      is_in_place |= is_output && !is_written(i);  // x.add_(y) comes as add(x, y, out=x)
      auto& bytes = is_output ? written_bytes : read_bytes;
      bytes = std::max<double>(bytes, t.nbytes());
      return t;
    });
  if (!device) return do_at_once(op, stack, "no tensor of the device");
  for (const auto& result : schema.returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType)
      return do_at_once(op, stack, "returns no tensor");
    if (written.empty() && result.alias_info()) return do_at_once(op, stack, "returns a view");
  }
  c10::DeviceGuard guard(*device);
  std::vector<at::Tensor> made;
  if (!is_in_place) {
    auto metas = all_mapped(schema, args, at::kMeta, [](const at::Tensor& t) {
      if (!is_here(t)) return t.defined() && t.dim() ? t.to(at::kMeta) : t;
      return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
    });
    try {
      op.callBoxed(&metas);
    } catch (const std::exception&) {
      return do_at_once(op, stack, "no shape");
    }
    for (size_t i = 0; i < metas.size(); ++i) {
      const auto meta = metas[i].toTensor();
      if (written.empty())
        made.push_back(at::empty_strided(meta.sizes(), meta.strides(),
                                         meta.options().device(*device)));
      else if (const auto t = args[written.at(i)].toTensor(); t.sizes() != meta.sizes())
        resized(t, meta.sizes());
      if (written.empty()) written_bytes = std::max<double>(written_bytes, made.back().nbytes());
    }
  }
  // One tensor stays one. With two over the same memory, a CPU kernel that writes one would first
  // copy all of the other, and so write back old bytes over what other streams write meanwhile.
  std::map<c10::TensorImpl*, at::Tensor> views;
  auto inner = all_mapped(schema, args, at::kCPU, [&](const at::Tensor& t) {
    if (!is_here(t)) return t.defined() ? t.clone() : t;
    auto& view = views[t.unsafeGetTensorImpl()];
    if (!view.defined()) view = kernel_view(t);
    return view;
  });
  std::vector<at::Tensor> results;
  for (const auto& t : made) results.push_back(kernel_view(t));
  Launch call("kernel");
  const double moved = read_bytes ? std::min(read_bytes, written_bytes) : written_bytes;
  current(device->index())
      .give({[op, inner, results]() mutable {
               at::AutoDispatchBelowADInplaceOrView below;
               op.callBoxed(&inner);
               for (size_t i = 0; i < results.size(); ++i) results[i].copy_(inner[i].toTensor());
             },
             lasting(costs().kernel_gbps, moved), &engine(device->index(), KERNEL)});
  stack->erase(stack->end() - n, stack->end());
  for (size_t i = 0; i < schema.returns().size(); ++i)
    stack->push_back(written.empty() ? made[i] : args[written[i]].toTensor());
}

// Views, which are only names for the same memory.
at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(t, size, stride, offset);
}
at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size),
                                    C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize_(const at::Tensor& t, c10::SymIntArrayRef size,
                          std::optional<at::MemoryFormat>) {
  return resized(t, C10_AS_INTARRAYREF_SLOW(size));
}
at::Tensor& set_storage(at::Tensor& t, at::Storage storage, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(t, storage, offset, size, stride);
}
void record_stream(at::Tensor& t, c10::Stream s) {
  device_memory().recordStream(t.storage().data_ptr(), s);
}

// ---- Page kernels and batches of copies --------------------------------------------------------
struct Rows {  // [rows, content] of some tensor
  uint8_t* at;
  int64_t row, step;  // bytes between rows, and between words of one row
};
void move(Rows to, Rows from, int64_t rows, int64_t content, int64_t word) {
  const int64_t nbytes = content * word;
  const bool is_dense = to.step == word && from.step == word;
  if (is_dense && to.row == nbytes && from.row == nbytes) {
    memcpy(to.at, from.at, rows * nbytes);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) {
    auto *a = to.at + r * to.row, *b = from.at + r * from.row;
    if (is_dense) memcpy(a, b, nbytes);
    for (int64_t c = 0; !is_dense && c < content; ++c)
      memcpy(a + c * to.step, b + c * from.step, word);
  }
}
struct Pages {  // a tensor as page kernels see it: its memory, shape and strides in bytes
  explicit Pages(const at::Tensor& t)
      : at((uint8_t*)behind(t.const_data_ptr())), size(t.sizes().vec()), step(t.strides().vec()) {
    TORCH_CHECK(is_here(t) && at::isIntegralType(t.scalar_type(), false), "sim: not device words");
    for (auto& each : step) each *= t.element_size();
  }
  Rows rows(int64_t offset) const {
    return {at + offset, step[step.size() - 2], step[step.size() - 1]};
  }
  uint8_t* at;
  std::vector<int64_t> size, step;
};
std::vector<Pages> pages_of(const at::Tensor& staged, at::TensorList caches, const at::Tensor& ids) {
  TORCH_CHECK(ids.scalar_type() == at::kLong && ids.dim() == 1 && ids.is_contiguous() &&
              ids.device() == staged.device(), "sim: ids are [n] int64 on the device");
  std::vector<Pages> out;
  for (const auto& cache : caches) {
    TORCH_CHECK(cache.dim() == 4 && cache.sizes() == caches[0].sizes() &&
                cache.strides() == caches[0].strides(), "sim: caches differ in shape or strides");
    TORCH_CHECK(cache.device() == staged.device() && cache.dtype() == staged.dtype(),
                "sim: caches and pages differ in device or dtype");
    out.emplace_back(cache);
  }
  return out;
}
void launch_pages(const at::Tensor& staged, double nbytes, std::function<void()> work) {
  Launch call("kernel");
  const int device = staged.device().index();
  if (costs().dry) work = [] {};
  current(device).give({std::move(work), lasting(costs().kernel_gbps, nbytes),
                        &engine(device, KERNEL)});
}
int64_t checked(int64_t block, int64_t blocks) {
  TORCH_CHECK(block >= 0 && block < blocks, "block ", block, " of ", blocks, " was addressed");
  return block;
}

// Row (l, i, h, n) of the p-th blocks of the caches is token t = (first_block + i) * N + n of layer l
// in `staged` [P, L, B', H', S', C], which is row (p, l, t / S', head_start + h, t % S') there.
void scatter_pages(const at::Tensor& staged, at::TensorList caches, const at::Tensor& ids,
                   int64_t first_block, int64_t head_start, int64_t head_end) {
  const Pages from(staged);
  const auto to = pages_of(staged, caches, ids);
  const auto& shape = to.at(0).size;  // [blocks, H, N, C]
  const int64_t tokens = shape[2], word = staged.element_size();
  const int64_t payloads = from.size[0], n = ids.numel() / payloads;
  TORCH_CHECK(from.size.size() == 6 && n * payloads == ids.numel() &&
              from.size[1] == (int64_t)to.size() &&
              from.size[5] == shape[3] && head_end - head_start == shape[1] && head_start >= 0 &&
              head_end <= from.size[3] && first_block >= 0 &&
              (first_block + n) * tokens <= from.size[2] * from.size[4],
              "sim: pages of shape ", staged.sizes(), " for ", n, " blocks of ", caches[0].sizes());
  launch_pages(staged, double(to.size() * ids.numel()) * shape[1] * tokens * shape[3] * word,
               [=, chosen = (int64_t*)behind(ids.const_data_ptr())] {
    for (int64_t p = 0; p < payloads; ++p)
      for (size_t l = 0; l < to.size(); ++l)
        for (int64_t i = 0; i < n; ++i) {
          const int64_t block = checked(chosen[p * n + i], shape[0]);
          for (int64_t h = 0; h < shape[1]; ++h)
            for (int64_t row = 0, run; row < tokens; row += run) {
              const int64_t t = (first_block + i) * tokens + row, in_page = t % from.size[4];
              run = std::min(tokens - row, from.size[4] - in_page);
              const auto& a = to[l].step;
              const auto& b = from.step;
              move(to[l].rows(block * a[0] + h * a[1] + row * a[2]),
                   from.rows(p * b[0] + l * b[1] + t / from.size[4] * b[2] +
                             (head_start + h) * b[3] + in_page * b[4]),
                   run, shape[3], word);
            }
        }
  });
}
// `staged` is [chunks, L, B, H, N, C], `ids` [chunks * B].
void gather_pages(at::TensorList caches, const at::Tensor& ids, const at::Tensor& staged) {
  const Pages to(staged);
  const auto from = pages_of(staged, caches, ids);
  const auto& shape = from.at(0).size;
  const auto& size = to.size;
  TORCH_CHECK(size.size() == 6 && size[0] * size[2] == ids.numel() &&
              size[1] == (int64_t)from.size() &&
              std::equal(shape.begin() + 1, shape.end(), size.begin() + 3),
              "sim: pages of shape ", staged.sizes(), " for ", ids.numel(), " blocks of ",
              caches[0].sizes());
  launch_pages(staged, staged.nbytes(),
               [=, word = staged.element_size(), chosen = (int64_t*)behind(ids.const_data_ptr())] {
    for (int64_t chunk = 0; chunk < size[0]; ++chunk)
      for (int64_t l = 0; l < size[1]; ++l)
        for (int64_t i = 0; i < size[2]; ++i) {
          const int64_t block = checked(chosen[chunk * size[2] + i], shape[0]);
          for (int64_t h = 0; h < size[3]; ++h)
            move(to.rows(chunk * to.step[0] + l * to.step[1] + i * to.step[2] + h * to.step[3]),
                 from[l].rows(block * from[l].step[0] + h * from[l].step[1]), size[4], size[5],
                 word);
        }
  });
}

// Copies between host and device by address, in one call. With `any_order` sources may be read
// before the stream gets there, and then about half of them are read during the call.
void batch_copy(const at::Tensor& src, const at::Tensor& dst, const at::Tensor& sizes,
                bool any_order) {
  for (const auto& t : {src, dst, sizes})
    TORCH_CHECK(t.is_cpu() && t.scalar_type() == at::kLong && t.is_contiguous() &&
                t.numel() == src.numel(), "sim: addresses and sizes are [n] int64 on the CPU");
  if (!src.numel()) return;
  Launch call("batch copy");
  static thread_local std::mt19937_64 dice(g_seed + gettid());
  struct Piece {
    uint8_t *to, *from;
    size_t size;
    std::string early;
  };
  std::vector<Piece> pieces;
  std::vector<std::shared_ptr<HostMemory::Use>> uses;
  size_t total = 0;
  bool is_up = false;
  for (int64_t i = 0; i < src.numel(); ++i) {
    const size_t size = sizes.data_ptr<int64_t>()[i];
    auto reach = [&](const at::Tensor& addresses, bool writes) -> uint8_t* {
      auto* const at = (uint8_t*)addresses.data_ptr<int64_t>()[i];
      if (owner(at, size) == t_device) return (uint8_t*)behind(at);
      uses.emplace_back();
      return host_memory().reaches(at, size, &uses.back(), writes) ? at : nullptr;
    };
    Piece piece{reach(dst, true), reach(src, false), size, {}};
    if (!piece.to || !piece.from)
      return fault("a batch copies from or to an address that the device cannot reach");
    is_up = owner((void*)dst.data_ptr<int64_t>()[i]) >= 0;
    total += size;
    if (any_order && !costs().dry && dice() % 2) piece.early.assign((char*)piece.from, size);
    pieces.push_back(std::move(piece));
  }
  if (costs().dry) pieces.clear();
  current(t_device).give(
      {[pieces = std::move(pieces), uses = std::move(uses)]() mutable {
         for (const auto& use : uses)
           if (use && use->fails()) return;
         for (const auto& piece : pieces)
           memcpy(piece.to, piece.early.empty() ? (char*)piece.from : piece.early.data(),
                  piece.size);
         uses.clear();
       },
       lasting(costs().copy_gbps, total),
       &engine(t_device, is_up ? TO_DEVICE : TO_HOST)});
}
void sleep(int64_t us) {
  Launch call("kernel");
  current(t_device).give({[] {}, std::chrono::microseconds(us)});
}

// ---- Controls, for tests -----------------------------------------------------------------------
void set_cost(double launch_us, double copy_gbps, double kernel_gbps, bool dry) {
  costs().launch_ns = int64_t(launch_us * 1000);
  costs().copy_gbps = copy_gbps;
  costs().kernel_gbps = kernel_gbps;
  costs().dry = dry;
}
void slow(int64_t device, int64_t stream, int64_t low_us, int64_t high_us) {  // stream -1: all
  auto& delay = stream < 0 ? device_delay(device) : queue(device, stream).delay;
  delay.low_us = low_us;
  delay.high_us = high_us;
  for (Queue* each : queues(device))
    if (stream < 0 || stream == each->id) each->cut();
}
void hold(int64_t device, int64_t stream, bool on) { queue(device, stream).hold(on); }
void set_seed(int64_t seed) {
  g_seed = seed;
  ++g_seeded;
}
void relax() {  // no stream is slow or held
  for (int device = 0; device < DEVICES; ++device) {
    slow(device, -1, -1, -1);
    for (Queue* each : queues(device)) {
      slow(device, each->id, -1, -1);
      each->hold(false);
    }
  }
}
void settle() {  // waits until all streams have done their work, failed or not
  for (int device = 0; device < DEVICES; ++device)
    for (Queue* each : queues(device)) each->point()->wait();
}
void register_host(const at::Tensor& memory) { host_memory().add(memory); }
void register_read_only(int64_t address, int64_t size) {
  host_memory().add_read_only(address, size);
}
void unregister_host(int64_t address) { host_memory().remove(address); }
void forget_dead_hosts() { host_memory().forget_dead(); }
void trim() {
  device_memory().trim();
  host_memory().trim();
}
std::string take_error() {
  host_memory().check_all_alive();
  Lock held(ledger().lock);
  auto error = std::exchange(ledger().fault, {});
  auto other = std::exchange(ledger().misuse, {});
  return error.empty() ? other : error;
}
std::tuple<std::vector<std::string>, std::vector<int64_t>, std::vector<int64_t>> counts(bool reset) {
  Lock held(ledger().lock);
  std::vector<std::string> calls;
  std::vector<int64_t> threads, numbers;
  for (const auto& [key, number] : ledger().counts) {
    calls.push_back(key.first);
    threads.push_back(key.second);
    numbers.push_back(number);
  }
  if (reset) ledger().counts.clear();
  return {calls, threads, numbers};
}
}  // namespace simdev

REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &simdev::host_memory())

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", simdev::empty);
  m.impl("empty_strided", simdev::empty_strided);
  m.impl("as_strided", simdev::as_strided);
  m.impl("view", simdev::view);
  m.impl("_reshape_alias", simdev::reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", simdev::resize_);
  m.impl("set_.source_Storage_storage_offset", simdev::set_storage);
  m.impl("_copy_from", simdev::copy_from);
  m.impl("_copy_from_and_resize", simdev::copy_from_and_resize);
  m.impl("_local_scalar_dense", simdev::local_scalar);
  m.impl("record_stream", simdev::record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&simdev::any_operator>());
}
TORCH_LIBRARY(simdev, m) {
  m.def("scatter_pages(Tensor staged, Tensor(a!)[] caches, Tensor ids, int first_block,"
        " int head_start, int head_end) -> ()", simdev::scatter_pages);
  m.def("gather_pages(Tensor[] caches, Tensor ids, Tensor(a!) staged) -> ()",
        simdev::gather_pages);
  m.def("batch_copy(Tensor src, Tensor dst, Tensor sizes, bool any_order) -> ()",
        simdev::batch_copy);
  m.def("sleep(int us) -> ()", simdev::sleep);
  m.def("set_cost(float launch_us, float copy_gbps, float kernel_gbps, bool dry) -> ()",
        simdev::set_cost);
  m.def("slow(int device, int stream, int low_us, int high_us) -> ()", simdev::slow);
  m.def("hold(int device, int stream, bool on) -> ()", simdev::hold);
  m.def("set_seed(int seed) -> ()", simdev::set_seed);
  m.def("relax() -> ()", simdev::relax);
  m.def("settle() -> ()", simdev::settle);
  m.def("register_host(Tensor memory) -> ()", simdev::register_host);
  m.def("unregister_host(int address) -> ()", simdev::unregister_host);
  m.def("register_read_only(int address, int size) -> ()", simdev::register_read_only);
  m.def("kernel_view(Tensor t) -> Tensor", simdev::kernel_view);
  m.def("forget_dead_hosts() -> ()", simdev::forget_dead_hosts);
  m.def("trim() -> ()", simdev::trim);
  m.def("take_error() -> str", simdev::take_error);
  m.def("counts(bool reset) -> (str[] calls, int[] threads, int[] numbers)", simdev::counts);
}
namespace {
const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new simdev::Hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &simdev::device_memory());
  return true;
}();
}  // namespace
