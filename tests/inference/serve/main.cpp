// Serves a frozen collection that was saved by torch.jit: reads batches, writes pools. Links libtorch and nothing else.
//
//   serve MODEL BATCH OUT     all three are files of torch.jit; BATCH has attributes values, lengths, weights.
#include <torch/script.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <vector>

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: serve MODEL BATCH OUT\n");
        return 2;
    }
    try {
        torch::NoGradGuard no_grad;
        torch::jit::Module model = torch::jit::load(argv[1]);
        torch::jit::Module batch = torch::jit::load(argv[2]);
        std::vector<torch::jit::IValue> inputs{batch.attr("values"), batch.attr("lengths"), batch.attr("weights")};
        torch::Tensor pooled = model.forward(inputs).toTensor().contiguous();
        std::ofstream out(argv[3], std::ios::binary);
        out.write(static_cast<const char*>(pooled.data_ptr()), static_cast<std::streamsize>(pooled.nbytes()));
        std::printf("%ld x %ld\n", static_cast<long>(pooled.size(0)), static_cast<long>(pooled.size(1)));
        return out.good() ? 0 : 1;
    } catch (const std::exception& e) {
        std::fprintf(stderr, "serve: %s\n", e.what());
        return 1;
    }
}
