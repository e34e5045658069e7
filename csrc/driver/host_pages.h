// The physical memory of one emulated device: memfd pages, charged against a capacity.
//
// Private pages of a device are runs of ONE sparse file, so that thousands of handles need no thousands of descriptors.
// Its offsets are unbounded and only bytes are charged: like a GPU's page tables it knows no fragmentation. Exportable
// pages have a file each, since a descriptor of it leaves the process.
//
// Invariant: free_bytes() + sum of the sizes of all living pages + sum of the sizes of lingering ones == total_bytes().
// Pages linger when their last owner here is gone while a descriptor, an import or an import's mapping of them is left
// anywhere, in other processes too. How that is known: what export_fd gives is an open file description of its own that
// holds a shared flock, so an exclusive flock succeeds exactly when every copy of it is gone.
//
// Threads: none of these classes locks; their owner does. poison() touches no shared state and needs no lock.
// Fork: in a child of the process that made it, a DeviceMemory's pages change nothing: the parent's files are left
// alone.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "../status.h"

namespace cumem {

// What fresh pages are filled with.
inline constexpr std::uint8_t kFreshPoison = 0xA5;

// Owns a descriptor. Invariant: get() == -1 or open.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept;
  ~FileDescriptor();

  [[nodiscard]] int get() const { return fd_; }
  int release();

 private:
  int fd_ = -1;
};

// A run of a file's pages. The pages live at least as long as the object; a mapping of it must not outlive it.
class HostPages {
 public:
  HostPages() = default;
  HostPages(const HostPages&) = delete;
  HostPages& operator=(const HostPages&) = delete;
  virtual ~HostPages() = default;

  [[nodiscard]] virtual int fd() const = 0;
  [[nodiscard]] virtual std::uint64_t offset() const = 0;
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  // A new descriptor, the caller's. kInvalidValue unless made exportable.
  virtual Result<int> export_fd();

  // Fills the pages with kFreshPoison, which is also what allocates them. kDriver with errno when the machine has no
  // memory for it.
  Status poison() const;
};

class DeviceMemory : public std::enable_shared_from_this<DeviceMemory> {
 public:
  static Result<std::shared_ptr<DeviceMemory>> open(std::uint64_t total_bytes);

  // Pages that nobody has touched. kOutOfDeviceMemory with the numbers; nothing charged then.
  Result<std::shared_ptr<HostPages>> allocate(std::uint64_t size, bool exportable);

  [[nodiscard]] std::uint64_t total_bytes() const { return total_bytes_; }
  // Also takes back what no longer lingers.
  [[nodiscard]] std::uint64_t free_bytes();

 private:
  friend class PrivatePages;
  friend class ExportablePages;
  struct Lingering {
    FileDescriptor file;
    std::uint64_t size;
  };

  DeviceMemory(FileDescriptor file, std::uint64_t total_bytes);
  Result<std::shared_ptr<HostPages>> allocate_private(std::uint64_t size);
  Result<std::shared_ptr<HostPages>> allocate_exportable(std::uint64_t size);
  Result<std::uint64_t> take_run(std::uint64_t size);
  void give_run(std::uint64_t offset, std::uint64_t size);
  void retire(FileDescriptor file, std::uint64_t size);
  [[nodiscard]] bool in_owner_process() const;

  const FileDescriptor file_;
  const std::uint64_t total_bytes_;
  const pid_t owner_;
  std::uint64_t charged_bytes_ = 0;
  std::uint64_t file_bytes_ = 0;                 // runs in use and free runs tile [0, file_bytes_)
  std::map<std::uint64_t, std::uint64_t> free_;  // offset -> size; never adjacent, punched
  std::vector<Lingering> lingering_;
};

// Pages that some driver exported, `size` bytes of them; not charged here, their exporter is. `fd` stays the caller's.
// kInvalidValue when fd is no such descriptor or the size is another.
Result<std::shared_ptr<HostPages>> import_pages(int fd, std::uint64_t size);

}  // namespace cumem
