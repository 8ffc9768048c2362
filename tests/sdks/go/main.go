// AWS SDK for Go v2. Arguments: see programs.py.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
)

var ctx = context.Background()

type line map[string]any

func say(said line) {
	text, _ := json.Marshal(said)
	fmt.Println(string(text))
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err)
	}
	return value
}

func main() {
	endpoint, url, scenario, count := os.Args[1], os.Args[2], os.Args[3], must(strconv.Atoi(os.Args[4]))
	client := sqs.New(sqs.Options{
		BaseEndpoint:  aws.String(endpoint),
		Region:        "us-east-1",
		ClientLogMode: aws.LogRetries,
		Credentials: aws.CredentialsProviderFunc(func(context.Context) (aws.Credentials, error) {
			return aws.Credentials{AccessKeyID: "x", SecretAccessKey: "x"}, nil
		}),
	})

	receive := func(most int32) []types.Message {
		return must(client.ReceiveMessage(ctx, &sqs.ReceiveMessageInput{
			QueueUrl: &url, MaxNumberOfMessages: most, WaitTimeSeconds: 5, MessageAttributeNames: []string{"All"},
			MessageSystemAttributeNames: []types.MessageSystemAttributeName{types.MessageSystemAttributeNameAll},
		})).Messages
	}
	got := func(m types.Message) {
		said := line{"got": *m.Body, "id": *m.MessageId, "receives": m.Attributes["ApproximateReceiveCount"],
			"group": m.Attributes["MessageGroupId"]}
		if n, ok := m.MessageAttributes["n"]; ok {
			said["n"] = *n.StringValue
		}
		say(said)
	}
	change := func(m types.Message, seconds int32) {
		must(client.ChangeMessageVisibility(ctx, &sqs.ChangeMessageVisibilityInput{
			QueueUrl: &url, ReceiptHandle: m.ReceiptHandle, VisibilityTimeout: seconds,
		}))
	}
	group := func(i int) (*string, *string) {
		if !strings.HasSuffix(url, ".fifo") {
			return nil, nil
		}
		return aws.String(fmt.Sprint("g", i%7)), aws.String(fmt.Sprint("d", i))
	}
	attributes := func(i int) map[string]types.MessageAttributeValue {
		return map[string]types.MessageAttributeValue{
			"n": {DataType: aws.String("Number"), StringValue: aws.String(fmt.Sprint(i))},
		}
	}

	switch scenario {
	case "send":
		groupId, id := group(0)
		sent := must(client.SendMessage(ctx, &sqs.SendMessageInput{
			QueueUrl: &url, MessageBody: aws.String("m-0"), MessageAttributes: attributes(0),
			MessageGroupId: groupId, MessageDeduplicationId: id,
		}))
		say(line{"sent": "m-0", "id": *sent.MessageId})
		for i := 1; i < count; {
			entries := []types.SendMessageBatchRequestEntry{}
			for ; i < count && len(entries) < 10; i++ {
				groupId, id := group(i)
				entries = append(entries, types.SendMessageBatchRequestEntry{
					Id: aws.String(fmt.Sprint("m-", i)), MessageBody: aws.String(fmt.Sprint("m-", i)),
					MessageAttributes: attributes(i), MessageGroupId: groupId, MessageDeduplicationId: id,
				})
			}
			answer := must(client.SendMessageBatch(ctx, &sqs.SendMessageBatchInput{QueueUrl: &url, Entries: entries}))
			for _, failed := range answer.Failed {
				log.Print("not sent: ", *failed.Message)
			}
			for _, done := range answer.Successful {
				say(line{"sent": *done.Id, "id": *done.MessageId})
			}
		}
	case "work":
		say(line{"ready": true})
		for count > 0 {
			messages, entries := receive(10), []types.DeleteMessageBatchRequestEntry{}
			for _, m := range messages {
				got(m)
				entries = append(entries, types.DeleteMessageBatchRequestEntry{Id: m.MessageId, ReceiptHandle: m.ReceiptHandle})
			}
			if len(entries) == 0 {
				continue
			}
			answer := must(client.DeleteMessageBatch(ctx, &sqs.DeleteMessageBatchInput{QueueUrl: &url, Entries: entries}))
			for _, failed := range answer.Failed {
				log.Print("not deleted: ", *failed.Message)
			}
			for _, done := range answer.Successful {
				say(line{"deleted": *done.Id})
				count--
			}
		}
	case "heartbeat":
		m := receive(1)[0]
		got(m)
		for range count {
			time.Sleep(time.Second)
			change(m, 4)
		}
		must(client.DeleteMessage(ctx, &sqs.DeleteMessageInput{QueueUrl: &url, ReceiptHandle: m.ReceiptHandle}))
		say(line{"deleted": *m.MessageId})
	case "fail":
		for range count {
			m := receive(1)[0]
			got(m)
			change(m, 0)
		}
		say(line{"left": len(receive(1))})
	}
}
