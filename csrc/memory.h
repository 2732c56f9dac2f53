// Aligned memory in huge pages, for weights and work space.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ridgeline {

// Owns `size` bytes, 64-byte aligned, zeroed, with `kSlack` readable bytes behind them (kernels prefetch ahead).
class Buffer {
 public:
  static constexpr size_t kSlack = 8192;

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
    uint8_t* d = data_;
    data_ = other.data_;
    other.data_ = d;
    size_t s = size_;
    size_ = other.size_;
    other.size_ = s;
  }
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ridgeline
