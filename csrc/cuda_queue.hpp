// Kernel launches through the CUDA driver, each as one call. The driver is loaded by name at run time, so neither the build nor
// a machine without a GPU needs CUDA.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace disagg {

// Lets the calling thread use the CUDA driver while the server captures a CUDA graph in another thread. Without this the driver
// refuses calls such as `cuEventQuery`, and the capture fails. Does nothing in a process that has not loaded the driver.
inline void allow_calls_during_capture() {
    void* loaded = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!loaded) return;
    int mode = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
    if (void* exchange = dlsym(loaded, "cuThreadExchangeStreamCaptureMode")) reinterpret_cast<int (*)(int*)>(exchange)(&mode);
    dlclose(loaded);
}

// The driver call that failed (nullptr if none did), and its status.
struct CudaStatus {
    const char* call = nullptr;
    int status = 0;
};

// Work for one stream of one context. Handles are the driver's, as integers.
class CudaQueue {
  public:
    static constexpr int kNotReady = 600;  // CUDA_ERROR_NOT_READY

    // Throws `std::runtime_error` if `library` is not a CUDA driver.
    CudaQueue(const std::string& library, std::uintptr_t context, std::uintptr_t stream, std::uintptr_t uploads)
        : context_{handle(context)}, stream_{handle(stream)}, uploads_{handle(uploads)} {
        void* loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!loaded) throw std::runtime_error(std::string("CUDA driver: cannot be loaded: ") + dlerror());
        find(loaded, "cuCtxPushCurrent_v2", push_);
        find(loaded, "cuCtxPopCurrent_v2", pop_);
        find(loaded, "cuMemcpyHtoDAsync_v2", upload_);
        find(loaded, "cuStreamWaitEvent", wait_);
        find(loaded, "cuEventRecord", record_);
        find(loaded, "cuEventQuery", query_);
        find(loaded, "cuLaunchKernel", launch_);
    }

    // Copies `nbytes` bytes from `host` to `device` on the upload stream. Later launches wait for the event `uploaded`, which
    // is recorded behind the copy.
    CudaStatus upload(std::uint64_t device, std::uintptr_t host, std::size_t nbytes, std::uintptr_t uploaded) const {
        const Current current{*this};
        if (current.status) return {"cuCtxPushCurrent", current.status};
        if (int status = upload_(device, handle(host), nbytes, uploads_)) return {"cuMemcpyHtoDAsync", status};
        if (int status = record_(handle(uploaded), uploads_)) return {"cuEventRecord", status};
        if (int status = wait_(stream_, handle(uploaded), 0)) return {"cuStreamWaitEvent", status};
        return {};
    }

    // Launches a kernel whose parameters are all 64-bit words, with `shared` bytes of shared memory for each block. Records
    // the event `done` behind it, unless that is 0.
    CudaStatus launch(std::uintptr_t kernel, const std::vector<std::uint64_t>& arguments, unsigned blocks, unsigned threads,
                      unsigned shared, std::uintptr_t done) const {
        std::vector<const void*> pointers;
        pointers.reserve(arguments.size());
        for (const std::uint64_t& argument : arguments) pointers.push_back(&argument);
        const Current current{*this};
        if (current.status) return {"cuCtxPushCurrent", current.status};
        if (int status = launch_(handle(kernel), blocks, 1, 1, threads, 1, 1, shared, stream_, pointers.data(), nullptr))
            return {"cuLaunchKernel", status};
        if (done)
            if (int status = record_(handle(done), stream_)) return {"cuEventRecord", status};
        return {};
    }

    // The status of an event: 0 if the work before it is done, kNotReady if it is not, otherwise an error.
    CudaStatus query(std::uintptr_t event) const {
        const Current current{*this};
        if (current.status) return {"cuCtxPushCurrent", current.status};
        return {"cuEventQuery", query_(handle(event))};
    }

  private:
    // Makes the context current on this thread for its lifetime.
    struct Current {
        explicit Current(const CudaQueue& queue) : owner{queue}, status{queue.push_(queue.context_)} {}
        ~Current() {
            void* popped = nullptr;
            if (!status) owner.pop_(&popped);
        }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;
        const CudaQueue& owner;
        int status;
    };

    static void* handle(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

    template <typename Function>
    static void find(void* library, const char* name, Function*& found) {
        found = reinterpret_cast<Function*>(dlsym(library, name));
        if (!found) throw std::runtime_error(std::string("CUDA driver: the library has no function ") + name);
    }

    void* context_;
    void* stream_;
    void* uploads_;
    int (*push_)(void*);
    int (*pop_)(void**);
    int (*upload_)(std::uint64_t, const void*, std::size_t, void*);
    int (*wait_)(void*, void*, unsigned);
    int (*record_)(void*, void*);
    int (*query_)(void*);
    int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, const void* const*,
                   void**);
};

// An event that is recorded on a queue's stream.
struct CudaEvent {
    const CudaQueue* queue = nullptr;
    std::uintptr_t event = 0;

    int status() const { return queue->query(event).status; }
    // Whether the work before the event is done or has failed.
    bool is_done() const { return status() != CudaQueue::kNotReady; }
};

}  // namespace disagg
