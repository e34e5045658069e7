#include "host_pages.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>
#include <utility>

namespace cumem {
namespace {

Status system_error(const char* call, const char* what) {
  const int error = errno;
  return Status(Code::kDriver, call, std::string(what) + " failed, errno " + std::to_string(error), error);
}

constexpr std::size_t kPoisonChunk = std::size_t{1} << 20;
constexpr unsigned kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

}  // namespace

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) close(fd_);
}

int FileDescriptor::release() { return std::exchange(fd_, -1); }

Result<int> HostPages::export_fd() {
  return Status(Code::kInvalidValue, "export_fd", "the handle was not created exportable");
}

Status HostPages::poison() const {
  static const std::vector<char> pattern(kPoisonChunk, static_cast<char>(kFreshPoison));
  for (std::uint64_t done = 0; done < size();) {
    const std::size_t length = static_cast<std::size_t>(std::min<std::uint64_t>(pattern.size(), size() - done));
    const ssize_t written = pwrite(fd(), pattern.data(), length, static_cast<off_t>(offset() + done));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return system_error("create", "pwrite to the memfd");
    done += static_cast<std::uint64_t>(written);
  }
  return {};
}

// --- the three kinds of pages ---

class PrivatePages final : public HostPages {
 public:
  PrivatePages(std::shared_ptr<DeviceMemory> memory, std::uint64_t offset, std::uint64_t size)
      : memory_(std::move(memory)), offset_(offset), size_(size) {}
  ~PrivatePages() override { memory_->give_run(offset_, size_); }
  [[nodiscard]] int fd() const override { return memory_->file_.get(); }
  [[nodiscard]] std::uint64_t offset() const override { return offset_; }
  [[nodiscard]] std::uint64_t size() const override { return size_; }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  const std::uint64_t offset_;
  const std::uint64_t size_;
};

class ExportablePages final : public HostPages {
 public:
  ExportablePages(std::shared_ptr<DeviceMemory> memory, FileDescriptor file, std::uint64_t size)
      : memory_(std::move(memory)), file_(std::move(file)), size_(size) {}
  ~ExportablePages() override { memory_->retire(std::move(file_), size_); }
  [[nodiscard]] int fd() const override { return file_.get(); }
  [[nodiscard]] std::uint64_t offset() const override { return 0; }
  [[nodiscard]] std::uint64_t size() const override { return size_; }

  // A description of its own for each export, locked: see the head of host_pages.h.
  Result<int> export_fd() override {
    FileDescriptor exported(open(("/proc/self/fd/" + std::to_string(fd())).c_str(), O_RDWR | O_CLOEXEC));
    if (exported.get() < 0) return system_error("export_fd", "open of the memfd");
    if (flock(exported.get(), LOCK_SH | LOCK_NB) != 0) return system_error("export_fd", "flock of the memfd");
    return exported.release();
  }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  FileDescriptor file_;
  const std::uint64_t size_;
};

namespace {

class ImportedPages final : public HostPages {
 public:
  ImportedPages(FileDescriptor file, std::uint64_t size) : file_(std::move(file)), size_(size) {}
  [[nodiscard]] int fd() const override { return file_.get(); }
  [[nodiscard]] std::uint64_t offset() const override { return 0; }
  [[nodiscard]] std::uint64_t size() const override { return size_; }

 private:
  const FileDescriptor file_;
  const std::uint64_t size_;
};

}  // namespace

Result<std::shared_ptr<HostPages>> import_pages(int fd, std::uint64_t size) {
  struct stat info = {};
  const int seals = fcntl(fd, F_GET_SEALS);  // fails on all but memfds
  if (seals < 0 || (static_cast<unsigned>(seals) & kSizeSeals) != kSizeSeals || fstat(fd, &info) != 0) {
    return Status(Code::kInvalidValue, "import_fd", "the descriptor is not an exported handle");
  }
  if (static_cast<std::uint64_t>(info.st_size) != size) {
    return Status(Code::kInvalidValue, "import_fd",
                  "size is " + std::to_string(size) + ", the exported handle's is " + std::to_string(info.st_size));
  }
  FileDescriptor copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (copy.get() < 0) return system_error("import_fd", "dup of the descriptor");
  return std::shared_ptr<HostPages>(std::make_shared<ImportedPages>(std::move(copy), size));
}

// --- DeviceMemory ---

DeviceMemory::DeviceMemory(FileDescriptor file, std::uint64_t total_bytes)
    : file_(std::move(file)), total_bytes_(total_bytes), owner_(getpid()) {}

Result<std::shared_ptr<DeviceMemory>> DeviceMemory::open(std::uint64_t total_bytes) {
  FileDescriptor file(memfd_create("cumem-device", MFD_CLOEXEC));
  if (file.get() < 0) return system_error("HostDriver::create", "memfd_create");
  return std::shared_ptr<DeviceMemory>(new DeviceMemory(std::move(file), total_bytes));
}

bool DeviceMemory::in_owner_process() const { return getpid() == owner_; }

std::uint64_t DeviceMemory::free_bytes() {
  const auto gone = [this](Lingering& pages) {
    if (flock(pages.file.get(), LOCK_EX | LOCK_NB) != 0) return false;
    charged_bytes_ -= pages.size;
    return true;
  };
  lingering_.erase(std::remove_if(lingering_.begin(), lingering_.end(), gone), lingering_.end());
  return total_bytes_ - charged_bytes_;
}

Result<std::shared_ptr<HostPages>> DeviceMemory::allocate(std::uint64_t size, bool exportable) {
  const std::uint64_t free = free_bytes();
  if (size > free) return Status::out_of_device_memory("create", size, free);
  auto pages = exportable ? allocate_exportable(size) : allocate_private(size);
  if (pages.ok()) charged_bytes_ += size;
  return pages;
}

Result<std::shared_ptr<HostPages>> DeviceMemory::allocate_private(std::uint64_t size) {
  auto offset = take_run(size);
  if (!offset.ok()) return offset.status();
  return std::shared_ptr<HostPages>(std::make_shared<PrivatePages>(shared_from_this(), offset.value(), size));
}

Result<std::shared_ptr<HostPages>> DeviceMemory::allocate_exportable(std::uint64_t size) {
  FileDescriptor file(memfd_create("cumem-exportable", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (file.get() < 0) return system_error("create", "memfd_create");
  if (ftruncate(file.get(), static_cast<off_t>(size)) != 0) return system_error("create", "ftruncate of the memfd");
  if (fcntl(file.get(), F_ADD_SEALS, kSizeSeals) != 0) return system_error("create", "sealing of the memfd");
  return std::shared_ptr<HostPages>(std::make_shared<ExportablePages>(shared_from_this(), std::move(file), size));
}

// First fit, else the end of the file.
Result<std::uint64_t> DeviceMemory::take_run(std::uint64_t size) {
  const auto fit = std::find_if(free_.begin(), free_.end(), [size](const auto& run) { return run.second >= size; });
  if (fit != free_.end()) {
    const auto [offset, length] = *fit;
    free_.erase(fit);
    if (length > size) free_.emplace(offset + size, length - size);
    return offset;
  }
  const std::uint64_t offset = file_bytes_;
  if (ftruncate(file_.get(), static_cast<off_t>(offset + size)) != 0) return system_error("create", "ftruncate");
  file_bytes_ = offset + size;
  return offset;
}

// The pages leave memory here: a hole holds none.
void DeviceMemory::give_run(std::uint64_t offset, std::uint64_t size) {
  if (!in_owner_process()) return;
  fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(size));
  charged_bytes_ -= size;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + size) {
    size += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += size;
      return;
    }
  }
  free_.emplace(offset, size);
}

void DeviceMemory::retire(FileDescriptor file, std::uint64_t size) {
  if (!in_owner_process()) return;
  lingering_.push_back(Lingering{std::move(file), size});
  static_cast<void>(free_bytes());  // at once, if no export of it is left
}

}  // namespace cumem
