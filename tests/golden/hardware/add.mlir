module @m {
  func.func @main(%arg0: tensor<128x64xf32> {tf.aliasing_output = 0 : i32}, %arg1: tensor<128x64xf32>) -> (tensor<128x64xf32>, tensor<128x64xf32>) {
    %0 = stablehlo.add %arg0, %arg1 : tensor<128x64xf32>
    %1 = stablehlo.add %arg1, %arg1 : tensor<128x64xf32>
    return %0, %1 : tensor<128x64xf32>, tensor<128x64xf32>
  }
}

