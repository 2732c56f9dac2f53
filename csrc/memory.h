// Aligned memory in huge pages, for weights and work space.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace ridgeline {

class Region;

// Owns `size` bytes, 64-byte aligned, zeroed, with `kSlack` readable bytes behind them (kernels prefetch ahead). Those of
// kSmall bytes and more share regions of huge pages; a region goes when the last of its buffers does.
class Buffer {
 public:
  static constexpr size_t kSlack = 8192, kSmall = 65536;

  Buffer() = default;
  explicit Buffer(size_t size);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();

  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  // At least `size` bytes; the contents are lost when it grows.
  void need(size_t size) {
    if (size > size_) *this = Buffer(size + size / 4);
  }
  template <class T> T* as() const { return reinterpret_cast<T*>(data_); }

 private:
  void swap(Buffer& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(region_, other.region_);
  }
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
  std::shared_ptr<Region> region_;      // null: from the heap
};

}  // namespace ridgeline
