/* The same 4×4 weight by the C interface. */
#include <rarefy/c.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  const int32_t crow[] = {0, 1, 2}, col[] = {1, 0};
  const float values[] = {1, 2, 3, 4, 5, 6, 7, 8}, x[] = {1, 10, 100, 1000},
              expected[] = {2100, 4300, 65, 87};
  const rarefy_weight_info info = {4, 4, 2, 2, 2, RAREFY_F32, values, crow, col, NULL};
  rarefy_weight* weight = NULL;
  if (rarefy_weight_from_blocks(&info, &weight) != RAREFY_OK) {
    printf("%s\n", rarefy_last_error());
    return 1;
  }
  float y[4];
  const rarefy_matrix in = {x, RAREFY_F32, 1, 4, 4};
  const rarefy_output out = {y, RAREFY_F32, 1, 4, 4};
  const rarefy_status status = rarefy_linear(&in, weight, NULL, RAREFY_NONE, &out, NULL);
  const int right = status == RAREFY_OK && memcmp(y, expected, sizeof y) == 0;
  printf("rarefy %s: %s\n", rarefy_version(), right ? "ok" : "wrong");
  rarefy_weight_free(weight);
  return right ? 0 : 1;
}
